"""A map_reduce raises these errors when the user's own functions, or the files, fail."""

from __future__ import annotations

from phalanx.errors import PhalanxError


class TaskError(PhalanxError):
    """A task failed for good, or too many records were bad. All ranks raise it, with the error where it happened."""
