"""A `Recording` is a step as it ran: what every rank did when, which stage is the slowest, and which cut is better."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx._base.partition.balance import balance
from phalanx.pipeline.schedule import Action, Kind, Schedule, plan_schedule
from phalanx.pipeline.simulate import Span, Timeline, simulate

_FORMAT = 1


@dataclass(frozen=True)
class LayerTime:
    """A `LayerTime` is a layer of the model and what it took of a micro-batch's time, forward and backward."""

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Suggestion:
    """A suggestion is another cut, as layers per stage, and how long a step would take with it."""

    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Recording:
    """A recording is one step.

    `spans[rank]` has when an action was due, begun and ended; `layers[stage]` what each layer took.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, float, float, float], ...], ...]
    layers: tuple[tuple[LayerTime, ...], ...]
    failed: Action | None = None

    @property
    def timeline(self) -> Timeline:
        """Return when actions ran; ranks' clocks are those of their host."""
        zero = min((due for spans in self.spans for _, due, _, _ in spans), default=0.0)
        return Timeline(
            tuple(tuple(Span(a, begin - zero, end - zero) for a, _, begin, end in spans) for spans in self.spans)
        )

    def waited(self, rank: int) -> float:
        """Return how long a rank waited for what an action needed."""
        return sum(begin - due for _, due, begin, _ in self.spans[rank])

    def mean_seconds(self, kind: Kind, stage: int) -> float:
        """Return what a stage's forward or backward of a micro-batch took."""
        rank = self.schedule.rank_of(stage)
        took = [end - begin for a, _, begin, end in self.spans[rank] if a.kind == kind and a.stage == stage]
        return sum(took) / len(took) if took else 0.0

    @property
    def without_waiting(self) -> Timeline:
        """Return the same stages if nothing came late: what the schedule makes of these times."""
        return simulate(self.schedule, self._seconds(self.mean_seconds))

    @property
    def bottleneck(self) -> int:
        """Return the rank that works longest; all others wait for it."""
        timeline = self.timeline
        return max(range(self.schedule.num_ranks), key=timeline.busy)

    @property
    def suggestion(self) -> Suggestion | None:
        """Return the cut of these layers whose longest stage is shortest; None if the layers' times are not known."""
        layers = [layer for stage in self.layers for layer in stage]
        if len(layers) < self.schedule.num_stages or not any(layer.forward_s for layer in layers):
            return None
        counts = balance([layer.forward_s + layer.backward_s for layer in layers], self.schedule.num_stages)
        bounds = [sum(counts[:stage]) for stage in range(len(counts) + 1)]

        def seconds(kind: Kind, stage: int) -> float:
            own = layers[bounds[stage] : bounds[stage + 1]]
            forward, backward = sum(x.forward_s for x in own), sum(x.backward_s for x in own)
            return {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}[kind]

        return Suggestion(tuple(counts), simulate(self.schedule, self._seconds(seconds)).seconds)

    @staticmethod
    def _seconds(of: Callable[[Kind, int], float]) -> Callable[[Action], float]:
        known: dict[tuple[str, int], float] = {}

        def seconds(action: Action) -> float:
            key = (action.kind, action.stage)
            if key not in known:
                known[key] = of(action.kind, action.stage)
            return known[key]

        return seconds

    def save(self, path: str | Path) -> None:
        """Write the recording to `path`, for `phalanx explain pipeline --recording PATH`."""
        document = {
            "format": _FORMAT,
            "schedule": self.schedule.name,
            "ranks": self.schedule.num_ranks,
            "stages": self.schedule.num_stages,
            "micro_batches": self.schedule.micro_batches,
            "failed": None if self.failed is None else str(self.failed),
            "spans": [[[str(a), due, begin, end] for a, due, begin, end in spans] for spans in self.spans],
            "layers": [[[x.name, x.forward_s, x.backward_s] for x in stage] for stage in self.layers],
        }
        Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def load_recording(path: str | Path) -> Recording:
    """Return what `Recording.save` wrote.

    Raises:
        ValueError: the file holds something else.
        OSError: it can't be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        document: dict[str, Any] = json.loads(text)
        if document["format"] != _FORMAT:
            raise ValueError(f"{path} has the format {document['format']}, and this program reads {_FORMAT}")
        schedule = plan_schedule(document["schedule"], document["ranks"], document["micro_batches"], document["stages"])
        return Recording(
            schedule,
            tuple(tuple((parse_action(a), *map(float, times)) for a, *times in s) for s in document["spans"]),  # type: ignore[misc]
            tuple(tuple(LayerTime(*layer) for layer in stage) for stage in document["layers"]),
            None if document["failed"] is None else parse_action(document["failed"]),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no recording of a pipeline: {type(error).__name__}: {error}") from error


def parse_action(text: str) -> Action:
    """Return the action that is printed as `text`: 1B3 is the backward of micro-batch 3 on stage 1.

    Raises:
        ValueError: the text is no action.
    """
    for kind in ("F", "B", "I", "W"):
        stage, found, micro_batch = text.strip().partition(kind)
        if found and stage.isdecimal() and micro_batch.isdecimal():
            return Action(kind, int(stage), int(micro_batch))
    raise ValueError(f"{text!r} is no action of a pipeline; 1B3 is the backward of micro-batch 3 on stage 1")


def name_layers(recording: Recording, counts: Sequence[int]) -> list[str]:
    """Return the first layer of every stage of another cut, at which that stage begins."""
    names = [layer.name for stage in recording.layers for layer in stage]
    return [names[sum(counts[:stage])] for stage in range(len(counts))]
