"""Keep the sums over a rank's steps, and turn a finished step into a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._comm.diagnostics.step_machine import FinishedStep
from phalanx._comm.diagnostics.step_records import StepRecord


@dataclass
class StepTally:
    """A `StepTally` is the state so far. All of it can be written as JSON."""

    rank: int
    num_steps: int = 0
    ahead: int | None = None
    """The difference between the run's number of a step and this process's number; None if unknown."""
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
