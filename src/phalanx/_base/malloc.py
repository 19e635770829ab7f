"""Decide what glibc's malloc keeps of freed memory: what a training step frees for the next step, and no more."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers are those of malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # that glibc takes


@functools.cache
def keep_freed_memory() -> None:
    """Set the limits up to which glibc keeps freed memory to where they end in a process that frees large blocks.

    It moves them by itself, with the largest block that it has seen freed, up to 32 MiB for a block and 64 MiB at the
    end of the heap. A model of small tensors stays far below: it gives the memory of its activations back in each step
    and takes zeroed pages for them in the next, 3 of 26 ms of a small ResNet's step. Nothing is changed where malloc
    was set up by its variables, as by `phalanx run`, or is not glibc's.
    """
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


def give_back_freed_memory() -> None:
    """Give freed memory back to the system, which malloc would keep for good: by `keep_freed_memory`, as `phalanx run`
    sets it up, or because what was freed lies between blocks that are in use.

    It does nothing where malloc is not glibc's. Cost: a hundredth of a second where hundreds of megabytes were freed.
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
