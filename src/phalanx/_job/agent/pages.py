"""Keep the pages on which ranks count their steps, as they have shown them to the agent."""

from __future__ import annotations

import os
from collections.abc import Sequence

from phalanx._comm.diagnostics.progress_page import Progress, read_page

_MAX_PAGES = 4096  # pages of processes that are no ranks, or not any more, are kept up to this number


class Pages:
    """`Pages` keeps the newest page of each process. It owns the descriptors."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # by process

    def add(self, pid: int, fds: Sequence[int]) -> None:
        """Add a page that the process shows; the descriptors become ours. What is not a page is closed."""
        kept = fds[0] if len(fds) == 1 and read_page(fds[0]) is not None else -1
        for fd in fds:
            if fd != kept:
                os.close(fd)
        if kept == -1:
            return
        old = self._fds.pop(pid, None)
        if old is not None:
            os.close(old)
        self._fds[pid] = kept
        if len(self._fds) > _MAX_PAGES:
            os.close(self._fds.pop(next(iter(self._fds))))

    def fds_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the descriptors of those processes that have a page; they stay ours."""
        return {pid: self._fds[pid] for pid in pids if pid in self._fds}

    def read(self, pid: int) -> Progress | None:
        """Return how far the process has come; None if it does not tell."""
        fd = self._fds.get(pid)
        return None if fd is None else read_page(fd)

    def drop(self, pid: int) -> None:
        """Forget a process that has ended: an elastic job may lose a thousand."""
        fd = self._fds.pop(pid, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
