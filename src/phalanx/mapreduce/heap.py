"""Give freed memory back to the system: C's allocator keeps it, and large values of changing sizes leave holes.

In a test with values of 1 MB, 70 MB had been freed and were still held, where 16 were asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_LARGE_BYTES = 32 << 10


def give_back(held_bytes: int, count: int) -> None:
    """Give memory back after so many values of so many bytes together were freed; if they were small, this does
    nothing.
    """
    if count and held_bytes // count >= _LARGE_BYTES and (trim := _find_trim()) is not None:
        trim(0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # it is not glibc's
        return None
    trim.argtypes = [ctypes.c_size_t]
    found: Callable[[int], int] = trim
    return found
