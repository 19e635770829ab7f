"""Set up glibc's malloc so that it keeps the memory that a training step frees for the next step, and no other."""

from __future__ import annotations

import ctypes
import functools
import os

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
    """Give back what was freed and no later step needs, as where parameters have moved into shared memory.

    malloc would keep it for good: by `keep_freed_memory`, or as `phalanx run` sets it up. The next step takes what it
    needs anew, and from then on it is kept.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # it is not glibc's
        return
