"""Keep the numbers of a rank's steps, and what makes a finished step a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._comm.diagnostics.step_file import StepRecord
from phalanx._comm.diagnostics.step_machine import FinishedStep


@dataclass
class StepTally:
    """It is the state so far. All of it can be written as JSON."""

    rank: int
    num_steps: int = 0
    ahead: int | None = None
    """How much higher the run's number of a step is than this process's number; None if it is not known."""
    generation: int = 0
    sample_share: float = 1.0
    process: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """The process's numbers at the last look: resident and shared memory, processor time, preemptions, device memory.
    """
    first_broken: int = 0
    last_finite: int = 0
    """The last step whose loss was a finite number. This and `first_broken` are counted here, because a merged record
    no longer says in which of its steps the loss ceased to be one.
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
        """Return the number that the last step has in the run; None if nothing has told it."""
        return self.num_steps + self.ahead if self.ahead is not None and self.num_steps else None
