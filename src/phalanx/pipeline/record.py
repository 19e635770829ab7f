"""Record a step of a pipeline on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from phalanx._base.partition.measure import LayerCost
from phalanx.pipeline.execute import Executor, Work
from phalanx.pipeline.explanation import ideal, plain, report
from phalanx.pipeline.recording import LayerTime, Recording
from phalanx.pipeline.schedule import Action, Schedule


class Record:
    """A record is what `Pipeline.recorded` gives; `recording` is the last step in it, once that is over."""

    def __init__(self, group: dist.ProcessGroup, costs: Sequence[LayerCost] | None) -> None:
        self._group = group
        self._costs = costs
        self._mine: tuple[Any, Any] = ([], {})
        self._schedule: Schedule | None = None
        self._failed: Action | None = None
        self._failed_itself = False
        self._is_complete = False
        self.recording: Recording | None = None

    def note(self, work: Work, executor: Executor, *, failed: bool = False) -> None:
        """Keep this rank's part of a step."""
        step = executor.step
        self._schedule = step.schedule
        self._failed = step.at if failed else None
        self._failed_itself = failed and step.failure is not None and step.failure.by_itself
        spans = [(done.action, done.turn, done.begin, done.end) for done in work.done]
        self._mine = (spans, {stage.index: self._layers(stage, spans) for stage in executor.stages.values()})

    def _layers(self, stage: Any, spans: Sequence[tuple[Action, float, float, float]]) -> list[LayerTime]:
        """Return the times of a stage's layers in a micro-batch. A backward's time is known only of the whole stage: it
        is divided as in the example, or as the forward's is.
        """
        forward = {layer.name: 0.0 for layer in stage.part.layers}
        forward.update(stage.program.seconds or {})
        counts = max(sum(1 for a, *_ in spans if a.kind == "F" and a.stage == stage.index), 1)
        took = sum(end - begin for a, _, begin, end in spans if a.kind != "F" and a.stage == stage.index) / counts
        known = {cost.name: cost.backward_s for cost in self._costs or ()}
        weight = {name: known.get(name, seconds) for name, seconds in forward.items()}
        total = sum(weight.values()) or 1.0
        return [LayerTime(name, seconds / counts, took * weight[name] / total) for name, seconds in forward.items()]

    def finish(self, *, alone: bool) -> None:
        """Gather all ranks' parts; gather only this rank's where a step failed and not all ranks have heard it."""
        if self._is_complete:
            return
        mine = (self._schedule, *self._mine, self._failed, self._failed_itself)
        parts: list[Any] = [(self._schedule, [], {}, None, False)] * self._group.size()
        if alone:
            parts[self._group.rank()] = mine
        else:
            dist.all_gather_object(parts, mine, group=self._group)
            self._is_complete = True
        schedule = next((part[0] for part in parts if part[0] is not None), None)
        if schedule is None:
            return
        layers = {stage: times for _, _, stages, _, _ in parts for stage, times in stages.items()}
        began = [(spans[-1][3], failed) for _, spans, _, failed, itself in parts if itself and spans]
        waited = [failed for _, _, _, failed, _ in parts if failed is not None]
        self.recording = Recording(
            schedule,
            tuple(tuple(spans) for _, spans, _, _, _ in parts),
            tuple(tuple(layers.get(stage, ())) for stage in range(schedule.num_stages)),
            min(began)[1] if began else next(iter(waited), None),
        )

    def __str__(self) -> str:
        if self.recording is None:
            return "nothing was recorded"
        schedule, timeline = self.recording.schedule, self.recording.timeline
        drawn = plain(schedule, ideal(schedule), self.recording.failed)
        ran = plain(schedule, timeline, self.recording.failed)
        return "\n".join(["as planned", *drawn, "as it ran", *ran, *report(self.recording)])
