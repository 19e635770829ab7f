"""Notice that a process is gone, without being its parent: one `pidfd` per process, shared by all groups.

A pidfd becomes readable when the process ends, whatever ended it, and cannot be fooled by a reused process number:
the start time is compared once, when it is opened. Where processes have no numbers for each other (pid namespaces), or
may not open pidfds, `liveness_pipe` does the same with pipes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.processes import read_start_ticks, read_stat


@dataclass(frozen=True)
class ProcessId:
    """It names a process for good: its number, when it started (clock ticks after boot), and where these hold.

    `namespace` names the pid and time namespace; it is empty where the process cannot tell. `has_pidfds` says that the
    kernel lets it open pidfds.
    """

    pid: int
    start_ticks: int
    namespace: str
    has_pidfds: bool = True

    @classmethod
    def of_self(cls) -> ProcessId:
        """Return this process."""
        pid = os.getpid()
        ticks = read_start_ticks(pid)
        return cls(pid, ticks or 0, _namespace() if ticks is not None else "", _has_pidfds())

    def has_ended(self) -> bool:
        """Return whether the process is known to be gone; False also if this process cannot see it."""
        return self._can_be_seen() and not self._is_there()

    def is_running(self) -> bool:
        """Return whether the process is known to live; False also if this process cannot see it."""
        return self._can_be_seen() and self._is_there()

    def _can_be_seen(self) -> bool:
        return bool(self.namespace) and self.namespace == _namespace()

    def _is_there(self) -> bool:
        fields = read_stat(self.pid)
        return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks


def can_watch_each_other(processes: Sequence[ProcessId]) -> bool:
    """Return whether each can open a pidfd of each other one. All of them get the same answer."""
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
    except (AttributeError, OSError):  # this is another system, or there is an old kernel, or a filter
        return False
    return True


def wait_status(process: ProcessId) -> int | None:
    """Return how it ended, as `waitpid` would say, while it is a zombie that we may look at; else None."""
    if process.namespace != _namespace():
        return None
    fields = read_stat(process.pid)
    if len(fields) < 50 or fields[0] not in "ZX" or int(fields[19]) != process.start_ticks:
        return None
    return int(fields[49])


class _Watch:
    """It has pidfds by process, counted: many groups watch the same few processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[ProcessId, tuple[int, int]] = {}

    def acquire(self, process: ProcessId) -> int:
        """Return a descriptor that can be read once `process` is gone, which it may be already. `can_watch_each_other`
        holds.

        Raises:
            PhalanxError: this process may not have one more descriptor.
        """
        with self._lock:
            fd, uses = self._open.get(process, (-1, 0))
            if uses == 0:
                try:
                    fd = _open(process)
                except OSError as error:
                    raise PhalanxError(f"process {process.pid} cannot be watched: {error.strerror}") from None
            self._open[process] = (fd, uses + 1)
            return fd

    def release(self, process: ProcessId) -> None:
        """Give back one descriptor of `acquire`."""
        with self._lock:
            fd, uses = self._open.get(process, (-1, 0))
            if uses > 1:
                self._open[process] = (fd, uses - 1)
            elif uses == 1:
                del self._open[process]
                os.close(fd)


def _open(process: ProcessId) -> int:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return _of_the_gone()
    if read_start_ticks(process.pid) not in (process.start_ticks, None):
        os.close(fd)
        return _of_the_gone()
    return fd


def _of_the_gone() -> int:
    """Return a descriptor that can be read at once."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


watch = _Watch()


class Pidfds:
    """It is one rank's view of `processes`, its own the `rank`-th: a descriptor for each, -1 for itself."""

    def __init__(self, processes: Sequence[ProcessId], rank: int) -> None:
        self._watched: list[ProcessId] = []
        fds = []
        try:
            for r, process in enumerate(processes):
                fds.append(-1 if r == rank else watch.acquire(process))
                if r != rank:
                    self._watched.append(process)
        except PhalanxError:
            self.close()
            raise
        self.fds = tuple(fds)

    def close(self) -> None:
        """Let go of all descriptors."""
        for process in self._watched:
            watch.release(process)
        self._watched = []
