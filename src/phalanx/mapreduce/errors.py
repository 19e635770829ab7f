"""What a map_reduce raises when the user's own functions, or the files, fail."""

from __future__ import annotations

from phalanx.errors import PhalanxError


class TaskError(PhalanxError):
    """A task failed for good, or too many records were bad; on every rank, with what was raised where it happened."""
