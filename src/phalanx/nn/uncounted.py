"""Mark a batch that does not count: a replica that has no sample of a step takes part in it with one for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# They are the process's, not a thread's: autograd runs the recomputations of checkpointing on threads of its own.
_open_marks: list[None] = []


@contextmanager
def uncounted_batch() -> Iterator[None]:
    """Mark the forward and backward inside as those of a batch that is in no mean: its loss is multiplied by zero.

    Layers that span ranks take part in their collectives with no value, so that the others get the same as without.
    """
    _open_marks.append(None)
    try:
        yield
    finally:
        _open_marks.pop()


def is_uncounted() -> bool:
    """Return whether the forward that runs is of a batch that does not count."""
    return bool(_open_marks)
