"""Which rank's failure came first, and how it is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx.launch.processes import name_signal

# How much later than its cause a silent death (a signal, os._exit) may be seen: the kernel closes the dying rank's
# sockets first, so peers can raise because of it before its parent hears of it.
SILENT_LAG_S = 0.5

_MAX_REPORT_BYTES = 100_000  # a report is one datagram; the default socket buffer takes about 200 kB
_OUTSIDE_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Report:
    """An exception that nobody caught in a rank, told by the rank itself. `types` are the names of its class's MRO."""

    rank: int
    pid: int
    at: float
    types: tuple[str, ...]
    summary: str
    place: str
    traceback: str

    def to_bytes(self) -> bytes:
        """The report as one datagram; of a longer traceback the middle is left out."""
        fields = asdict(self)
        for key in ("summary", "traceback"):
            text = fields[key]
            if len(text) > _MAX_REPORT_BYTES // 8:  # JSON may take six bytes for a character
                half = _MAX_REPORT_BYTES // 16
                fields[key] = f"{text[:half]}\n  [… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        return cls(**{**fields, "types": tuple(fields["types"])})


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process: `status` is its exit code, or minus the signal that killed it."""

    rank: int
    pid: int
    status: int
    at: float
    dump: str = ""  # faulthandler's, of a fatal signal


@dataclass(frozen=True)
class Failure:
    """A rank that failed: its report, its exit, or both. A rank can report and then hang in its own clean-up."""

    rank: int
    report: Report | None
    exit: Exit | None

    @property
    def code(self) -> int:
        """The exit code that a shell would show: 128 + n for signal n; 1 for a reported rank that had to be killed."""
        if self.exit is None or (self.report is not None and self.exit.status == -signal.SIGKILL):
            return 1
        return self.exit.status if self.exit.status >= 0 else 128 - self.exit.status


def decide_failures(
    exits: Mapping[int, Exit], reports: Mapping[int, Report], sent: Mapping[int, float]
) -> list[Failure]:
    """The failed ranks, the first cause in front.

    Args:
        exits: by rank, of all that ended.
        reports: by rank.
        sent: when we first sent which signal to stop ranks: a death by one of them, later, is our doing.

    In order of time, with two corrections: a silent death is dated back by `SILENT_LAG_S`, and a rank whose exception
    says that a peer was lost stands behind all that don't.
    """
    stopping_since = min(sent.values(), default=float("inf"))
    failures = []
    for rank in sorted(set(exits) | set(reports)):
        end, report = exits.get(rank), reports.get(rank)
        if report is None and (end is None or end.status == 0):
            continue
        failures.append(Failure(rank, report, end))

    def key(failure: Failure) -> tuple[int, float, int]:
        report, end = failure.report, failure.exit
        if report is not None:
            late = report.at > stopping_since
            return (2 if late else "PeerLostError" in report.types, report.at, failure.rank)
        assert end is not None
        if end.at <= stopping_since:
            lag = 0.0 if end.status == -signal.SIGABRT else SILENT_LAG_S
            return (0, end.at - lag, failure.rank)
        ours = -end.status in sent or -end.status not in _OUTSIDE_CAUSES
        return (2 if ours else 0, end.at, failure.rank)

    return sorted(failures, key=key)


def describe_failures(failures: Sequence[Failure], world_size: int, host: str, running: Sequence[int] = ()) -> str:
    """The last words of the command: consequences in one line each, then the first failure with its traceback."""
    first, others = failures[0], failures[1:]
    lines = []
    if others:
        lines.append("Later, and probably because of it:")
        lines += [f"  rank {failure.rank}: {_summarise(failure)}" for failure in others[:16]]
        if len(others) > 16:
            lines.append(f"  and {len(others) - 16} more ranks")
        lines.append("")
    pid = first.exit.pid if first.exit else first.report.pid if first.report else 0
    lines.append(f"First failure: rank {first.rank} of {world_size} on {host} (pid {pid}): {_summarise(first)}")
    if first.report and first.report.traceback:
        lines += ["", first.report.traceback.rstrip()]
    elif first.exit and first.exit.dump:
        lines += ["", first.exit.dump.rstrip()]
    return "\n".join(lines)


def _summarise(failure: Failure) -> str:
    report, end = failure.report, failure.exit
    how = "had to be stopped" if end is None else _describe_status(end.status)
    if report is None:
        return how
    if end is not None and end.status == -signal.SIGKILL:
        how = "did not end by itself afterwards and was killed"
    place = f" at {report.place}" if report.place else ""
    return f"{report.summary}{place} ({how})"


def _describe_status(status: int) -> str:
    return f"exit code {status}" if status >= 0 else name_signal(-status)
