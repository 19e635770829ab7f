"""Create files without a name that the ranks of an attempt open through the agent, or are given."""

from __future__ import annotations

import fcntl
import os
import resource
import sys

from phalanx.symmetric_memory.memfd import create

_STORES_END = 4096  # above the numbers of their descriptors
_next_store = 0


def create_scratch(name: str) -> int:
    """Return a file without a name that a rank writes, and we read when it can't speak any more; a write adds
    to its end.
    """
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_RDWR)
    fd = create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def create_store() -> int | None:
    """Return a file without a name, which the ranks open through this process: gone with it, and no port opened.

    The number of its descriptor is that of a store or of nothing, now and later: the end of torch's FileStore, which
    Python's collector may put off by several generations, opens the path once more to count itself out, and what it
    finds there must not be a pipe, which ends the rank, or another file, which it would write to.
    """
    global _next_store
    if sys.platform != "linux":
        return None
    fd = create("phalanx-store")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = min(soft, _STORES_END) if soft > 0 else _STORES_END
    first = end // 2  # what else an agent opens begins below, and rarely comes so far
    for lowest in (max(first, _next_store), first):
        try:
            store = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError:  # all numbers from there on have been used: from the first again
            continue
        os.close(fd)
        _next_store = store + 1
        return store
    return fd
