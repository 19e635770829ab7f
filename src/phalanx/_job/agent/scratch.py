"""Create anonymous files that the ranks of an attempt inherit, or open through the agent's /proc/PID/fd."""

from __future__ import annotations

import fcntl
import os
import resource
import sys

from phalanx._comm.symmetric_memory.memfd import create

_STORES_END = 4096  # descriptors of stores have numbers below this
_next_store = 0


def create_scratch(name: str) -> int:
    """Return an anonymous file to which a rank appends, and which the agent reads when the rank cannot report."""
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_RDWR)
    fd = create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def create_store() -> int | None:
    """Return an anonymous file for the ranks' FileStore. It needs no port, and disappears with this process.

    Stores have descriptor numbers of their own: the destructor of torch's FileStore, which garbage collection may delay
    by several generations, opens the path once more to decrement its count. If the number were reused for a pipe, the
    rank would die; any other file would be overwritten.
    """
    global _next_store
    if sys.platform != "linux":
        return None
    fd = create("phalanx-store")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = min(soft, _STORES_END) if soft > 0 else _STORES_END
    first = end // 2  # an agent's other descriptors have lower numbers, and rarely reach this one
    for lowest in (max(first, _next_store), first):
        try:
            store = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError:  # all numbers from `lowest` on are used: begin with the first again
            continue
        os.close(fd)
        _next_store = store + 1
        return store
    return fd
