"""Set how much freed memory glibc's malloc keeps, so that a training step reuses the memory of the previous one."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # the largest that glibc accepts


@functools.cache
def keep_freed_memory() -> None:
    """Set glibc's mmap and trim thresholds to the values that they reach in a process that frees large blocks.

    glibc raises both by itself with the largest freed block: the mmap threshold up to 32 MiB, and the trim threshold,
    for the end of the heap, up to 64 MiB. With small tensors they stay far lower: each step returns the memory of its
    activations to the system, and the next step gets zeroed pages, which takes 3 of 26 ms of a small ResNet's step.
    Nothing is changed if environment variables configure malloc, as those of `phalanx run` do, or if malloc is not
    glibc's.
    """
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


def release_freed_memory() -> None:
    """Give the freed memory that malloc keeps back to the system.

    malloc keeps memory because of `keep_freed_memory` or `phalanx run`, or because it lies between blocks in use. This
    does nothing if malloc is not glibc's. Cost: 10 ms for hundreds of megabytes.
    """
    if (trim := _find_trim()) is not None:
        trim(0)


@functools.cache
def _find_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    found: Callable[[int], int] = trim
    return found


_LARGE_BYTES = 32 << 10


def release_freed_values(held_bytes: int, count: int) -> None:
    """Give memory back to the system after `count` values of `held_bytes` in total were freed, unless they were small.

    malloc keeps that memory, and large values of varying sizes fragment it. In a test with values of 1 MB and a limit
    of 16 MB, malloc kept 70 MB of freed memory.
    """
    if count and held_bytes // count >= _LARGE_BYTES:
        release_freed_memory()
