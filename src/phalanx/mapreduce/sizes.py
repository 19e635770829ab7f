"""How much memory Python objects hold, by a sample: enough to stay within a limit, cheap enough to ask often.

What is sampled follows from the data alone, not from time: where a table is spilled decides how its values are
grouped, and so the rounding of their sums.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

_SAMPLE = 256
_ITEMS = 16  # of a container, which stand for all
_DEPTH = 4


def size_of(value: Any, depth: int = _DEPTH) -> int:
    """The bytes that `value` holds, those of what it contains included."""
    if isinstance(value, torch.Tensor):
        return 200 + value.element_size() * value.numel()
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


def _scaled(sizes: Any, count: int) -> int:
    sample = list(islice(sizes, _ITEMS))
    return sum(sample) * count // len(sample) if sample else 0


def size_of_table(table: dict[Any, Any], value_depth: int = _DEPTH) -> int:
    """The bytes that a dict and all in it hold; of keys and values those of some hundreds are looked at."""
    if not table:
        return 0
    step = max(1, len(table) // _SAMPLE)
    sizes = [size_of(key) + size_of(value, value_depth) for key, value in islice(table.items(), 0, None, step)]
    return sys.getsizeof(table) + sum(sizes) * len(table) // len(sizes)
