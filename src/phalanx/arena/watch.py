"""Know when a process is gone, without being its parent: one `pidfd` per process, shared by all groups.

A pidfd becomes readable when the process ends, whatever ended it, and cannot be fooled by a reused process number:
the start time is compared once, when it is opened.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessId:
    """A process for good: its number, when it started (clock ticks after boot), and in which pid namespace."""

    pid: int
    start_ticks: int
    namespace: str

    @classmethod
    def of_self(cls) -> ProcessId:
        """This process."""
        pid = os.getpid()
        return cls(pid, start_ticks(pid) or 0, _namespace())


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks after boot (field 22 of /proc/PID/stat); None if it is not there."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            return f.read().rpartition(")")[2].split()
    except OSError:
        return []


def wait_status(pid: int) -> int | None:
    """How process `pid` ended, as `waitpid` would say, while it is a zombie that we may look at; else None."""
    fields = _stat(pid)
    if len(fields) < 50 or fields[0] not in "ZX":
        return None
    return int(fields[49])


class _Watch:
    """pidfds by process, counted: many groups watch the same few processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[ProcessId, tuple[int, int]] = {}

    def acquire(self, process: ProcessId) -> int:
        """A pidfd for `process`, or -1 where it cannot be watched (another pid namespace, a kernel without pidfd)."""
        if process.namespace != _namespace() or not hasattr(os, "pidfd_open"):
            return -1
        with self._lock:
            fd, uses = self._open.get(process, (-1, 0))
            if uses == 0:
                try:
                    fd = os.pidfd_open(process.pid)
                except OSError:
                    return -1
                if start_ticks(process.pid) not in (process.start_ticks, None):
                    os.close(fd)
                    return -1
            self._open[process] = (fd, uses + 1)
            return fd

    def release(self, process: ProcessId) -> None:
        """Give back one `acquire` that returned a descriptor."""
        with self._lock:
            fd, uses = self._open.get(process, (-1, 0))
            if uses > 1:
                self._open[process] = (fd, uses - 1)
            elif uses == 1:
                del self._open[process]
                os.close(fd)


watch = _Watch()
