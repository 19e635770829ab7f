"""The errors that `map_reduce` raises when the user's functions, or the files, fail."""

from __future__ import annotations

from phalanx.errors import PhalanxError


class TaskError(PhalanxError):
    """A task failed for good, or too many records were bad. All ranks raise it, with the original error."""
