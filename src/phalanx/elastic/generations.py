"""Ask who is in the job: the launcher alone decides, and the ranks report what they hear, and wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.errors import PhalanxError


@dataclass(frozen=True)
class GenerationNotice:
    """A `GenerationNotice` announces one membership of the job.

    `environment` is what a rank of it that is started now would find, in this rank's place.
    """

    number: int
    environment: Mapping[str, str]

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> GenerationNotice:
        return cls(int(message["generation"]), dict(message["environment"]))


class JobEndedExit(SystemExit):
    """The end of a process whose elastic job has failed; the script itself did not ask for it."""


class JobEndedError(PhalanxError):
    """The launcher has given the job up, since there were fewer ranks than the minimum for too long. `exit_code` is
    what this process should end with.
    """

    def __init__(self, message: str, *, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LeaveError(PhalanxError):
    """The host of this rank leaves the job, which goes on without it: this rank ends, and nobody waits for it."""


class NoGenerationError(PhalanxError):
    """The launcher begins no other generation: what this rank has reported is its failure now."""


class SupersededError(Exception):
    """While the ranks of a generation meet, the launcher has begun another."""


@dataclass
class RankLoss:
    """A `RankLoss` is what a rank reports. With `disagrees` no rank is lost: they called different operations."""

    generation: int
    step: int
    error: str
    ranks: tuple[int, ...] = field(default=())
    disagrees: bool = False


class Generations(Protocol):
    """`Generations` is this rank's connection to the process that decides."""

    def report(self, loss: RankLoss) -> None:
        """Report that this rank has lost a peer and waits."""

    def next_generation(self, after: int, timeout_s: float) -> GenerationNotice:
        """Wait for a generation later than `after`, as long as the deciding process says that there may be one.

        Raises:
            JobEndedError: there will be none, and this rank should save what it holds.
            LeaveError: there will be one, without this rank.
            NoGenerationError: there will be none, and the loss that was reported is this rank's failure.
            DeadlineError: nothing was heard of the deciding process for `timeout_s`.
        """

    def newer_than(self, number: int) -> bool:
        """Return whether a later generation is announced, or wanted because ranks wait to join; this does not wait."""

    def regrouped(self, number: int) -> None:
        """Report that this rank is in the group of that generation."""

    def failed(self, step: int, error: str) -> None:
        """Report that an exception of the user's own is about to end this rank."""

    def finished(self) -> None:
        """Report that the training is over on this rank, and on all others."""

    def close(self) -> None: ...
