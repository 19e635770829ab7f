"""Mark a batch that does not count: a replica without samples in a step takes part in it with a dummy batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Per process, not per thread: autograd runs the recomputations of checkpointing on its own threads.
_open_marks: list[None] = []


@contextmanager
def uncounted_batch() -> Iterator[None]:
    """Mark the forward and backward inside as passes of a batch that does not count: its loss is multiplied by zero.

    Layers that span ranks take part in their collectives without values, so that the others' results are unaffected.
    """
    _open_marks.append(None)
    try:
        yield
    finally:
        _open_marks.pop()


def is_uncounted() -> bool:
    """Return whether the current forward is of a batch that does not count."""
    return bool(_open_marks)
