"""Detect the exit of a rank where pidfds do not work: in another pid namespace, or where a filter forbids them.

Each rank has a pipe, to which nothing is ever written. Only that rank has the write end; all ranks have the read end.
When the rank exits, for any reason, the kernel closes the write end, and the other ranks read end-of-file.

    rank 0   write end of 0   reads 1 2
    rank 1   write end of 1   reads 0 2          the read end is readable  <=>  its rank has exited
    rank 2   write end of 2   reads 0 1

The leader creates the pipes, sends them with the memory, and closes the other ranks' write ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from phalanx._comm.symmetric_memory.watch import ProcessId, can_watch_each_other

MOST_RANKS = 250  # Linux passes 253 descriptors at once: two memories, a rank's write end, and a read end per rank


def needs_liveness_pipes(processes: Sequence[ProcessId]) -> bool:
    """Return whether these processes of one host need pipes to detect each other's exit; all get the same result."""
    return len(processes) > 1 and not can_watch_each_other(processes)


def why_unwatched(processes: Sequence[ProcessId]) -> str:
    """Return why processes that need liveness pipes cannot have them, or "". All of them get the same result."""
    if len(processes) <= MOST_RANKS or not needs_liveness_pipes(processes):
        return ""
    return (
        f"{len(processes)} ranks of one host cannot watch each other: without pidfds (a filter forbids them, or the "
        f"ranks are in several pid namespaces) only {MOST_RANKS} can"
    )


class LivenessPipes:
    """`LivenessPipes` duplicates one rank's pipe ends: the read ends of all ranks, then its own write end."""

    def __init__(self, fds: Sequence[int], rank: int) -> None:
        with contextlib.ExitStack() as undo:
            copies = []
            for fd in fds:
                copies.append(os.dup(fd))
                undo.callback(os.close, copies[-1])
            undo.pop_all()
        *reads, self._own = copies
        self.fds = tuple(-1 if r == rank else fd for r, fd in enumerate(reads))
        self.stat_fds = (-1,) * len(reads)  # the ranks do not know each other's pids
        self._open = copies

    def close(self) -> None:
        """Close all ends; the other ranks detect this as an exit."""
        for fd in self._open:
            os.close(fd)
        self._open = []


@contextlib.contextmanager
def new_pipes(count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the read and the write ends of `count` pipes; close them on exit."""
    with contextlib.ExitStack() as stack:
        reads: list[int] = []
        writes: list[int] = []
        for _ in range(count):
            for end, ends in zip(os.pipe(), (reads, writes), strict=True):
                stack.callback(os.close, end)
                ends.append(end)
        yield reads, writes
