"""Create files without a name that the ranks of an attempt open through the agent, or are given."""

from __future__ import annotations

import fcntl
import os
import resource
import sys

from phalanx._comm.symmetric_memory.memfd import create

_STORES_END = 4096  # the descriptors of stores have numbers below this
_next_store = 0


def create_scratch(name: str) -> int:
    """Return a file without a name which a rank writes, and we read when it can't report; each write appends."""
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_RDWR)
    fd = create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def create_store() -> int | None:
    """Return a file without a name, which the ranks open through this process; it ends with it and opens no port.

    The number of its descriptor is never used for anything but stores: the end of torch's FileStore, which Python's
    collector may put off by several generations, opens the path once more to count itself out. It must not find a pipe
    there, which would end the rank, nor another file, which it would write to.
    """
    global _next_store
    if sys.platform != "linux":
        return None
    fd = create("phalanx-store")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = min(soft, _STORES_END) if soft > 0 else _STORES_END
    first = end // 2  # other descriptors of an agent have lower numbers, and rarely come so far
    for lowest in (max(first, _next_store), first):
        try:
            store = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError:  # all numbers from there on have been used: from the first again
            continue
        os.close(fd)
        _next_store = store + 1
        return store
    return fd
