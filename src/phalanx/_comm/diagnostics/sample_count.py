"""Estimate the number of samples in a batch from its structure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx._comm.diagnostics.interruptions import SuppressedErrors

_NUM_EXAMINED = 16  # elements of a list that are examined: the first ones show its kind
_DEEPEST = 8
_MOST_PARTS = 256  # of nested lists without a tensor, there are 16 on each level


def count_samples(batch: Any) -> float | None:
    """Return the first dimension of the first tensor (or array) in the batch, or else the first list's length, or None.

    Never raises, because it runs inside a user's loader.
    """
    with SuppressedErrors():
        parts = list(itertools.islice(_parts(batch, 0), _MOST_PARTS))
        for part in parts:
            length = _first_dimension(part)
            if length is not None:
                return length
        return next((float(len(part)) for part in parts if _is_plain_list(part)), None)
    return None


def _parts(batch: Any, depth: int) -> Iterator[Any]:
    yield batch
    if depth >= _DEEPEST:
        return
    inside: Any = ()
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, (list, tuple)):
        inside = batch[:_NUM_EXAMINED]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = vars(batch).values()
    for part in inside:
        yield from _parts(part, depth + 1)


def _first_dimension(part: Any) -> float | None:
    if getattr(part, "is_nested", False) is True:  # its shape cannot be read
        return float(part.size(0))
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
        return float(shape[0])
    return None


def _is_plain_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not any(isinstance(p, (list, tuple, Mapping)) for p in part[:1])
