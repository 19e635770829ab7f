"""`FailedSaves` counts the saves of a run that failed in a row, reports each, and raises when there are too many."""

from __future__ import annotations

from phalanx._base.log import get_logger
from phalanx.checkpoint.peers import Peers
from phalanx.errors import CheckpointError

_logger = get_logger(__name__)


class UnwrittenError(CheckpointError):
    """A checkpoint could not be written because of the disk, the network or another rank: a later one may succeed."""


class FailedSaves:
    """`FailedSaves` lets `allowed` saves fail in a row."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._count = 0
        self._last: str | None = None  # why the last save failed, if it did

    def reset(self) -> None:
        self._count, self._last = 0, None

    def report(self, error: CheckpointError) -> None:
        """Log at once, on the thread of a save, that it failed and what follows."""
        is_allowed = isinstance(error, UnwrittenError) and self._count < self.allowed
        _logger.warning("%s %s", error, self._outlook(self._count + 1) if is_allowed else "The next call raises this.")

    def add(self, peers: Peers, error: UnwrittenError, *, is_reported: bool) -> None:
        """Count a failed save. All ranks call it.

        Raises:
            CheckpointError: more than `allowed` have failed in a row.
        """
        self._count = peers.broadcast(self._count) + 1  # a rank that came later has counted fewer
        if self._count > self.allowed:
            self._last = None
            more = f" {self._count} saves in a row have failed (max_failures={self.allowed})." if self.allowed else ""
            raise CheckpointError(f"{error}{more}") from error.__cause__
        self._last = str(error)
        if peers.is_first and not is_reported:
            _logger.warning("%s %s", error, self._outlook(self._count))

    def raise_last(self, peers: Peers) -> None:
        """Return if the last save succeeded. All ranks call it.

        Raises:
            CheckpointError: it failed.
        """
        last, self._last = peers.broadcast(self._last), None
        if last is not None:
            raise CheckpointError(last)

    def _outlook(self, count: int) -> str:
        so_far = "" if count == 1 else f", after {count - 1} that failed before it"
        return (
            f"Training continues, and the next save is attempted as usual{so_far}; {self.allowed} in a row may fail "
            "(max_failures)."
        )
