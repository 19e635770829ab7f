"""Files without a name that the ranks of an attempt open through the agent, or are given."""

from __future__ import annotations

import fcntl
import os
import sys

from phalanx.symmetric_memory.memfd import create


def create_scratch(name: str) -> int:
    """A file without a name that a rank writes, and we read when it can't speak any more; a write adds to its end."""
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_RDWR)
    fd = create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def create_store() -> int | None:
    """A file without a name, which the ranks open through this process: gone with it, and no port opened."""
    return create("phalanx-store") if sys.platform == "linux" else None
