"""`Measurements` describe a run as data, from which findings are derived, pages are drawn, and runs are compared.

The file `report.json` contains them. Times are seconds since the run began, on the clock of the host that led it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT, VERSION = "phalanx-report", 1
PARTS = ("data", "forward", "backward", "update", "waiting", "communication", "other")

ENDS = ("well", "ended", "failed", "stopped", "killed", "running")

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class RankRun:
    """A `RankRun` is one process of a rank. `parts` maps each of `PARTS` to its mean seconds per step after warm-up."""

    rank: int
    attempt: int
    pid: int
    host: str
    node: int
    facts: Mapping[str, Any]
    begin: float
    end: float
    first_step: float | None  # when its first step began
    steps: int
    first_number: int  # the number of its first step in the run; 1 if unknown
    step_s: float
    longest_s: float
    parts: Mapping[str, float]
    samples_per_step: float
    num_workers: int | None
    last_phase: str
    ended: bool
    cpu_share: float | None  # the share of one core
    preemptions_per_s: float | None
    resident_bytes: float
    shared_bytes: float
    peak_bytes: float
    device_bytes: float
    step_curve: Curve = ()  # time, seconds of a step
    memory_curve: Curve = ()
    generations: tuple[tuple[int, float], ...] = ()  # by generation: its number, and when the first step in it began

    @property
    def reached(self) -> int:
        """Return the number of the process's last step in the run."""
        return self.first_number - 1 + self.steps


@dataclass(frozen=True)
class CollectiveTimes:
    """`CollectiveTimes` are collectives of one kind and size. `bandwidth` is the median bus bandwidth in bytes/s."""

    name: str
    num_bytes: float
    num_ranks: int
    count: float
    duration_s: float  # median time from the last rank's entry to the end
    waiting_s: float  # mean time for which a rank waits for the last rank
    bandwidth: float | None
    overlapped: bool = False  # most of the work was done earlier, during the backward


@dataclass(frozen=True)
class Lateness:
    """`Lateness` counts how often a rank was last in a collective, and how long the others waited for it, per step."""

    rank: int
    times: int
    lead_s: float


@dataclass(frozen=True)
class RunEvent:
    """A `RunEvent` is an event of the job: `kind` is loss, failure, host lost, stopped, signal or restart.

    For a loss, `pid` is the lost process, and `host` the name and address of its host if the host is lost, too.
    """

    at: float
    kind: str
    text: str
    rank: int | None = None
    detail: str = ""
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True)
class Measurements:
    """`Measurements` is a run. `end` is one of ENDS: "ended" if the end is unknown, "killed" if it was not recorded."""

    name: str
    command: str
    begun_unix: float
    duration_s: float
    end: str
    end_text: str
    exit_code: int | None
    world_size: int
    max_restarts: int
    ranks: tuple[RankRun, ...] = ()
    loss: Curve = ()  # step, mean over the ranks
    broken_step: int | None = None  # the first step whose loss is not finite
    stays_broken: bool = False  # whether no later loss is finite
    throughput: Curve = ()  # time, samples per second of all ranks
    has_samples: bool = False
    collectives: tuple[CollectiveTimes, ...] = ()
    lateness: tuple[Lateness, ...] = ()
    num_matched: int = 0  # collectives that were seen on all ranks
    copy_bytes_per_s: Mapping[str, float] = field(default_factory=dict)  # by host: one core's memcpy
    events: tuple[RunEvent, ...] = ()
    scalars: Mapping[str, Curve] = field(default_factory=dict)

    @property
    def last_attempt(self) -> tuple[RankRun, ...]:
        """Return, for each rank of the newest attempt, the process that progressed farthest.

        Lost processes are left out: they stopped long before the others, and did not close their records.
        """
        chosen: dict[int, RankRun] = {}
        for run in self.newest:
            known = chosen.get(run.rank)
            if known is None or (run.reached, run.end) > (known.reached, known.end):
                chosen[run.rank] = run
        end = max((run.end for run in chosen.values()), default=0.0)
        return tuple(chosen[rank] for rank in sorted(chosen) if not _is_lost(chosen[rank], end))

    @property
    def newest(self) -> tuple[RankRun, ...]:
        newest = max((rank.attempt for rank in self.ranks), default=0)
        return tuple(rank for rank in self.ranks if rank.attempt == newest)

    @property
    def steps(self) -> int:
        """Return how many steps are done: the highest step of any rank, because ranks may join late or leave early."""
        return max((run.reached for run in self.newest), default=0)

    @property
    def step_s(self) -> float:
        """Return the mean time of a step on the slowest rank."""
        return max((run.step_s for run in self.last_attempt), default=0.0)

    @property
    def samples_per_s(self) -> float | None:
        """Return the samples per second of all ranks together, after the first steps."""
        runs = [run for run in self.last_attempt if run.step_s > 0]
        return sum(run.samples_per_step / run.step_s for run in runs) if self.has_samples and runs else None

    @property
    def final_loss(self) -> float | None:
        """Return the last point of the loss curve."""
        return self.loss[-1][1] if self.loss else None

    def to_json(self) -> str:
        """Return the text of report.json, in which NaN and infinity are null, because JSON has neither."""
        fields = _without_nan({"format": FORMAT, "version": VERSION, **asdict(self)})
        return json.dumps(fields, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Measurements:
        """Decode the result of `to_json`.

        Raises:
            ValueError: `text` is not a report, is damaged, or was written by another version of Phalanx.
        """
        try:
            fields = json.loads(text)
        except ValueError:
            raise ValueError("not the report of a run: it is not JSON, or is truncated") from None
        if not isinstance(fields, dict) or fields.pop("format", "") != FORMAT:
            raise ValueError("not the report of a run")
        if fields.pop("version", None) != VERSION:
            raise ValueError("the report of another version of Phalanx")
        if fields.get("end") not in ENDS:
            raise ValueError(f"the report is damaged: end is {fields.get('end')!r}, not one of {', '.join(ENDS)}")
        try:
            return cls(
                **{
                    **fields,
                    "ranks": tuple(_rank_from(rank) for rank in fields["ranks"]),
                    "loss": _curve(fields["loss"]),
                    "throughput": _curve(fields["throughput"]),
                    "collectives": tuple(CollectiveTimes(**one) for one in fields["collectives"]),
                    "lateness": tuple(Lateness(**one) for one in fields["lateness"]),
                    "events": tuple(RunEvent(**one) for one in fields["events"]),
                    "scalars": {name: _curve(curve) for name, curve in fields["scalars"].items()},
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the report is damaged: {error}") from None


def _is_lost(run: RankRun, end: float) -> bool:
    return not run.ended and run.steps > 0 and end - run.end > max(10 * run.step_s, 0.1 * (end - run.begin), 1.0)


def _curve(points: Any) -> Curve:
    return tuple((float(x), math.nan if y is None else float(y)) for x, y in points)


def _without_nan(value: Any) -> Any:
    """Return `value` with None for each float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return value


def _rank_from(fields: dict[str, Any]) -> RankRun:
    return RankRun(
        **{
            **fields,
            "step_curve": _curve(fields["step_curve"]),
            "memory_curve": _curve(fields["memory_curve"]),
            "generations": tuple((int(number), float(at)) for number, at in fields["generations"]),
        }
    )
