"""The records of a rank's steps and collectives in the rank's step file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx._comm.diagnostics.step_machine import PHASES, FinishedStep


class StepRecord(NamedTuple):
    """A `StepRecord` summarizes consecutive steps; `first` is the number of its first step, in the whole run if known.

    Times are in seconds, by CLOCK_MONOTONIC; the phases are sums over the steps.
    """

    first: float
    num_steps: float
    begin: float
    end: float
    other: float
    data: float
    forward: float
    backward: float
    update: float
    samples: float
    loss: float  # sum over the steps that have a loss
    num_losses: float
    longest: float  # duration of the longest step, in seconds
    resident_bytes: float
    shared_bytes: float  # the shared part of these bytes
    cpu_s: float  # of the process, so far
    preemptions: float  # so far
    device_bytes: float
    rank: float  # it may change when other ranks are lost
    generation: float
    waited: float = 0.0  # seconds of waiting for other ranks outside of collectives, not in any phase


class OperationRecord(NamedTuple):
    """An `OperationRecord` is a collective as this rank saw it: times are nanoseconds of CLOCK_MONOTONIC."""

    group: float
    kind: float
    seq: float
    num_bytes: float
    enter_ns: float
    leave_ns: float
    phase: float
    step: float
    status: float


def merge(a: StepRecord, b: StepRecord) -> StepRecord:
    """Merge two consecutive records into one."""
    names = ("num_steps", "other", "data", "forward", "backward", "update", "waited", "samples", "loss", "num_losses")
    sums = {name: getattr(a, name) + getattr(b, name) for name in names}
    return b._replace(
        first=a.first,
        begin=a.begin,
        longest=max(a.longest, b.longest),
        resident_bytes=max(a.resident_bytes, b.resident_bytes),
        shared_bytes=max(a.shared_bytes, b.shared_bytes),
        device_bytes=max(a.device_bytes, b.device_bytes),
        **sums,
    )


def clamp_times(records: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the records with times that never decrease: the clock goes back when a VM is restored from a snapshot."""
    ordered: list[StepRecord] = []
    for record in records:
        begin = max(record.begin, ordered[-1].end) if ordered else record.begin
        end = max(record.end, begin)
        parts = {name: max(0.0, getattr(record, name)) for name in (*PHASES, "waited", "longest")}
        ordered.append(record._replace(begin=begin, end=end, **parts))
    return tuple(ordered)


@dataclass
class StepTally:
    """A `StepTally` has the totals over a rank's steps so far. All fields can be written as JSON."""

    rank: int
    num_steps: int = 0
    ahead: int | None = None
    """The offset from this process's step numbers to those of the whole run; None if unknown."""
    generation: int = 0
    sample_share: float = 1.0
    process: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """The last measurements of the process: resident and shared memory, CPU time, preemptions, device memory."""
    first_broken: int = 0
    last_finite: int = 0
    """The last step whose loss was finite. This and `first_broken` are kept here, because a merged record does not
    show which of its steps was the first with a loss that is not finite.
    """

    def add(self, step: FinishedStep) -> StepRecord:
        """Add a finished step; return its record."""
        self.num_steps += 1
        number = self.num_steps + (self.ahead or 0)
        loss = step.loss
        if loss is not None:
            if math.isfinite(loss):
                self.last_finite = number
            elif not self.first_broken:
                self.first_broken = number
        resident, shared, cpu_s, preemptions, device = self.process
        other, data, forward, backward, update, waited = step.parts
        return StepRecord(
            number, 1.0, step.begin, step.end, other, data, forward, backward, update, step.samples * self.sample_share,
            loss or 0.0, float(loss is not None), step.end - step.begin, resident, shared, cpu_s, preemptions, device,
            self.rank, self.generation, waited,
        )  # fmt: skip

    @property
    def reached(self) -> int | None:
        """Return the run's number of the last step; None if unknown."""
        return self.num_steps + self.ahead if self.ahead is not None and self.num_steps else None
