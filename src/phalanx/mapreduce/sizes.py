"""Estimate the memory of Python objects from a sample: accurate enough for a limit, cheap enough to repeat often.

The data alone determine the sample, not the time: when a table is spilled decides how its values are grouped, and so
how their sums are rounded.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch

_SAMPLE = 128
_LIST, _SLOT = 64, 10  # the bytes of a list object, and of a slot for an item
_PLAIN = {int, float, bool, type(None)}
_PLAIN_BYTES = 32  # the bytes of a number
_TEXT_BYTES = 56  # the bytes of a string without its characters
_ITEMS = 16  # the number of a container's items that are measured
_DEPTH = 4


def size_of(value: Any, depth: int = _DEPTH) -> int:
    """Return about how many bytes `value` takes, including its contents down to `depth` levels."""
    if isinstance(value, torch.Tensor):
        return 200 + value.element_size() * value.numel()
    # an unpickled array, or a view of another, reports no memory of its own
    if isinstance(value, np.ndarray | memoryview):
        return 120 + value.nbytes
    size = sys.getsizeof(value, 64)
    if depth == 0 or isinstance(value, str | bytes | bytearray):
        return size
    if isinstance(value, Mapping):
        return size + _scaled((size_of(k, depth - 1) + size_of(v, depth - 1) for k, v in value.items()), len(value))
    if isinstance(value, list | tuple | set | frozenset):
        return size + _scaled((size_of(item, depth - 1) for item in value), len(value))
    if hasattr(value, "__dict__"):
        return size + size_of(vars(value), depth - 1)
    return size


def quick_size(value: Any) -> int:
    """Return about what `size_of` returns, cheaply enough to measure every value."""
    kind = type(value)
    if kind in _PLAIN:
        return _PLAIN_BYTES
    if kind is str or kind is bytes:
        return _TEXT_BYTES + len(value)
    return size_of(value)


def cut_by_size(values: list[Any], most: int, most_bytes: int) -> Iterator[list[Any]]:
    """Yield parts of at most `most` values and about `most_bytes`; a larger value is a part by itself."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        most = min(most, max(1, most_bytes // _PLAIN_BYTES))
    elif kinds <= {str, bytes}:
        most = min(most, max(1, most_bytes // (_TEXT_BYTES + max(map(len, values)))))
    else:
        start = num_bytes = 0
        for stop, value in enumerate(values):
            size = quick_size(value)
            if stop > start and (num_bytes + size > most_bytes or stop - start == most):
                yield values[start:stop]
                start, num_bytes = stop, 0
            num_bytes += size
        yield values[start:]
        return
    for start in range(0, len(values), most):
        yield values[start : start + most]


def _scaled(sizes: Any, count: int) -> int:
    sample = list(islice(sizes, _ITEMS))
    return sum(sample) * count // len(sample) if sample else 0


def size_of_table(table: dict[Any, Any]) -> int:
    """Return the bytes of a dict and its contents, from a sample of a hundred keys and values."""
    if not table:
        return 0
    step = max(1, len(table) // _SAMPLE)
    sizes = [size_of(key) + size_of(value) for key, value in islice(table.items(), 0, None, step)]
    return sys.getsizeof(table) + sum(sizes) * len(table) // len(sizes)


def size_of_lists(table: dict[Any, Any]) -> int:
    """Return the bytes of a dict of lists or single values; values are sampled, because a few keys may have most."""
    if not table:
        return 0
    lists = list(table.values())
    ends = list(accumulate(len(one) if type(one) is list else 1 for one in lists))
    values = []
    for position in range(0, ends[-1], max(1, ends[-1] // _SAMPLE)):
        index = bisect_right(ends, position)
        one = lists[index]
        values.append(size_of(one[position - ends[index]] if type(one) is list else one))
    keys = [size_of(key) for key in islice(table, 0, None, max(1, len(table) // _SAMPLE))]
    keys_bytes = sys.getsizeof(table) + (sum(keys) // len(keys) + _LIST) * len(table)
    return keys_bytes + (sum(values) // len(values) + _SLOT) * ends[-1]


def plan_next_check(count: int, room: float) -> int:
    """Return the number of pairs at which to measure again, with `count` pairs now and room for about `room` more.

    That is halfway to a full table, because later pairs may be larger, and at most twice the current number.
    """
    return count + max(1, count // 64, min(count, int(room / 2)))
