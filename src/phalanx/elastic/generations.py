"""Define how a rank and the launcher agree on a new generation: the rank reports losses, the launcher decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.errors import PhalanxError


@dataclass(frozen=True)
class GenerationNotice:
    """A `GenerationNotice` announces a generation, which is one membership of the job.

    `environment` has the variables that the launcher would set for a process that it starts in this slot.
    """

    number: int
    environment: Mapping[str, str]

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> GenerationNotice:
        return cls(int(message["generation"]), dict(message["environment"]))


class JobEndedExit(SystemExit):
    """A `JobEndedExit` ends a process whose elastic job has failed; the script itself did not ask to exit."""


class JobEndedError(PhalanxError):
    """The job ends: it had fewer ranks than the minimum for too long, or the state cannot be restored.

    `exit_code` is the exit code for this process.
    """

    def __init__(self, message: str, *, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LeaveError(PhalanxError):
    """The host of this rank leaves the job. This rank exits, and the job continues without waiting for it."""


class NoGenerationError(PhalanxError):
    """The launcher starts no other generation, so this rank fails with the loss that it reported."""


class SupersededError(Exception):
    """The launcher has started another generation while the ranks of this one were forming their group."""


@dataclass
class RankLoss:
    """A `RankLoss` is a rank's report of a loss; if `disagrees`, of ranks that called different operations instead."""

    generation: int
    step: int
    error: str
    ranks: tuple[int, ...] = field(default=())
    disagrees: bool = False


class Generations(Protocol):
    """`Generations` is this rank's connection to the launcher, which decides who is in each generation."""

    def report(self, loss: RankLoss) -> None:
        """Report that this rank has lost a peer and waits for the next generation."""

    def next_generation(self, after: int, timeout_s: float) -> GenerationNotice:
        """Wait for a generation later than `after`, for as long as the launcher keeps sending messages.

        Raises:
            JobEndedError: there will be no later generation, and this rank should save its state.
            LeaveError: the next generation does not include this rank.
            NoGenerationError: there will be no later generation, and this rank fails with the loss that it reported.
            DeadlineError: the launcher sent nothing for `timeout_s`.
        """

    def newer_than(self, number: int) -> bool:
        """Return, without waiting, whether a later generation or the job's end is announced, or ranks wait to join."""

    def regrouped(self, number: int) -> None:
        """Report that this rank is in the group of generation `number`."""

    def failed(self, step: int, error: str) -> None:
        """Report that an exception in the user's code is about to end this rank."""

    def finished(self) -> None:
        """Report that the training has finished on all ranks."""

    def close(self) -> None: ...
