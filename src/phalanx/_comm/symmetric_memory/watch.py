"""Detect the end of a process that is not a child, with one `pidfd` per process, which all groups share.

A pidfd becomes readable when the process ends, for any reason, and is not confused by a reused pid: the start
time is compared once, when the pidfd is opened. If processes cannot see each other's pids (pid namespaces), or may not
open pidfds, `liveness_pipe` does the same with pipes.

Before the kernel signals the pidfd, it frees the process's memory, at a tenth of a second or more per gigabyte. So
waits also read /proc/PID/stat, which shows at once that the process is exiting.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx._base.processes import find_exit_status, read_start_ticks, read_stat
from phalanx.errors import PhalanxError


@dataclass(frozen=True)
class ProcessId:
    """A `ProcessId` identifies a process uniquely, by pid, start time (clock ticks after boot) and namespace.

    `namespace` names the pid and time namespaces; it is "" if unknown. `has_pidfds` is true if the kernel lets the
    process open pidfds.
    """

    pid: int
    start_ticks: int
    namespace: str
    has_pidfds: bool = True

    @classmethod
    def of_self(cls) -> ProcessId:
        pid = os.getpid()
        ticks = read_start_ticks(pid)
        return cls(pid, ticks or 0, _namespace() if ticks is not None else "", _has_pidfds())

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; False also if this process cannot see it."""
        return self._is_visible() and not self._exists()

    def is_running(self) -> bool:
        """Return whether the process is known to run; False also if this process cannot see it."""
        return self._is_visible() and self._exists()

    def _is_visible(self) -> bool:
        return bool(self.namespace) and self.namespace == _namespace()

    def _exists(self) -> bool:
        fields = read_stat(self.pid)
        return bool(fields) and find_exit_status(fields) is None and int(fields[19]) == self.start_ticks


def can_watch_each_other(processes: Sequence[ProcessId]) -> bool:
    """Return whether all `processes` can open each other's pidfds; the result is the same in all of them."""
    return len({p.namespace for p in processes}) == 1 and all(p.namespace and p.has_pidfds for p in processes)


def _namespace() -> str:
    try:
        pid, time = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))
    except OSError:
        return ""
    return f"{pid} {time}"


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, an old kernel, or a filter
        return False
    return True


def wait_status(process: ProcessId) -> int | None:
    """Return the wait status of an exiting process or a zombie; None if the status cannot be read."""
    if process.namespace != _namespace():
        return None
    fields = read_stat(process.pid)
    return find_exit_status(fields) if fields and int(fields[19]) == process.start_ticks else None


class WatchedProcess(NamedTuple):
    """A `WatchedProcess` is the pair of descriptors through which this process watches another.

    `pidfd` is readable once the process has ended. `stat` is its open /proc/PID/stat, or -1 if that is unreadable.
    """

    pidfd: int
    stat: int


class _DescriptorCache:
    """A `_DescriptorCache` counts the uses of each process's descriptors: many groups watch the same processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[ProcessId, tuple[WatchedProcess, int]] = {}

    def acquire(self, process: ProcessId) -> WatchedProcess:
        """Return the descriptors of `process`, which may have ended. `can_watch_each_other` must have returned True.

        Raises:
            PhalanxError: this process has no free descriptor.
        """
        with self._lock:
            watched, uses = self._open.get(process, (None, 0))
            if watched is None:
                try:
                    watched = _open(process)
                except OSError as error:
                    raise PhalanxError(f"process {process.pid} cannot be watched: {error.strerror}") from None
            self._open[process] = (watched, uses + 1)
            return watched

    def release(self, process: ProcessId) -> None:
        """Release the result of one `acquire`."""
        with self._lock:
            watched, uses = self._open.get(process, (None, 0))
            if watched is not None and uses > 1:
                self._open[process] = (watched, uses - 1)
            elif watched is not None:
                del self._open[process]
                _close(watched)


def _open(process: ProcessId) -> WatchedProcess:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return _ended_process()
    try:
        stat = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no /proc, or it hides others' processes, or no descriptor is free
        stat = -1
    watched = WatchedProcess(pidfd, stat)
    # another process may have the same pid now
    if read_start_ticks(process.pid) not in (process.start_ticks, None):
        _close(watched)
        return _ended_process()
    return watched


def _ended_process() -> WatchedProcess:
    """Return a `WatchedProcess` whose `pidfd` is readable at once: a pipe without a writer."""
    reading, writing = os.pipe()
    os.close(writing)
    return WatchedProcess(reading, -1)


def _close(watched: WatchedProcess) -> None:
    os.close(watched.pidfd)
    if watched.stat >= 0:
        os.close(watched.stat)


watch = _DescriptorCache()


class Pidfds:
    """`Pidfds` holds the descriptors of each of `processes`; those of `rank`, which is this process, are -1."""

    def __init__(self, processes: Sequence[ProcessId], rank: int) -> None:
        self._watched: list[ProcessId] = []
        found = []
        try:
            for r, process in enumerate(processes):
                found.append(WatchedProcess(-1, -1) if r == rank else watch.acquire(process))
                if r != rank:
                    self._watched.append(process)
        except PhalanxError:
            self.close()
            raise
        self.fds = tuple(one.pidfd for one in found)
        self.stat_fds = tuple(one.stat for one in found)

    def close(self) -> None:
        """Release all descriptors."""
        for process in self._watched:
            watch.release(process)
        self._watched = []
