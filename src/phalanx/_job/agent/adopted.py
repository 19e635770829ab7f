"""Track the ranks whose zygote has died: the agent, a child subreaper, is now their parent.

    before                        the zygote is killed              a loss later
    agent                         agent                             agent
      └─ zygote A                   ├─ rank 0, rank 1  (adopted)      ├─ rank 0
           ├─ rank 0                └─ zygote B  (importing torch)    └─ zygote B
           └─ rank 1                                                       └─ rank 1, replaced

The agent receives SIGCHLD when an adopted rank exits. If the agent is killed, the kernel kills the adopted ranks
(`phalanx.elastic.channel`), and the new zygote kills the ranks' children, which are in the old zygote's session.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phalanx._base.processes import kill_descendants, kill_sessions, reap_children, signal_children


@dataclass(frozen=True)
class AdoptedExit:
    """The exit of an adopted rank, in the form in which the zygote would have reported it."""

    rank: int
    pid: int
    status: int
    at: float


class AdoptedRanks:
    """`AdoptedRanks` signals and reaps the adopted ranks. It maps their pids to the ranks they were started with."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._sessions: dict[int, set[int]] = {}  # by zygote, whose pid is the session ID: the pids of its live ranks
        self.used = False  # whether a zygote has died; its orphaned descendants are then this process's children

    @property
    def sessions(self) -> tuple[int, ...]:
        """Return the IDs of the sessions that still have live ranks."""
        return tuple(self._sessions)

    def __contains__(self, pid: int) -> bool:
        return pid in self._ranks

    def adopt(self, zygote: int, ranks: dict[int, int]) -> None:
        """Adopt the ranks of a zygote that has died; `ranks` maps pids to ranks."""
        self.used = True
        self._ranks.update(ranks)
        if ranks:
            self._sessions[zygote] = set(ranks)

    def signal(self, signum: int, ranks: Iterable[int], *, group: bool) -> None:
        """Send `signum` to the adopted ranks among `ranks`, or to their process groups if `group` is set."""
        wanted = set(ranks)
        signal_children([pid for pid, rank in self._ranks.items() if rank in wanted], signum, group=group)

    def reap(self, zygote: int) -> Iterator[AdoptedExit]:
        """Reap the children that have exited, except `zygote`; yield the exits of adopted ranks.

        If a rank has failed, kill the rest of its process group.
        """
        for pid, status in reap_children(spared=zygote):
            if pid in self._ranks and status != 0:
                signal_children([pid], signal.SIGKILL, group=True)
            yield from self._remove(pid, status)

    def sweep(self, zygote: int) -> Iterator[AdoptedExit]:
        """Kill all descendants except `zygote` and its own descendants; yield the exits of the adopted ranks."""
        for pid, status in kill_descendants(list(self._ranks), spared=zygote).items():
            yield from self._remove(pid, os.waitstatus_to_exitcode(status))

    def _remove(self, pid: int, status: int) -> Iterator[AdoptedExit]:
        rank = self._ranks.pop(pid, None)
        if rank is None:
            return
        for session, living in list(self._sessions.items()):
            living.discard(pid)
            if not living:  # no rank of this session is left: kill the processes that its ranks have started
                kill_sessions([session])
                del self._sessions[session]
        yield AdoptedExit(rank, pid, status, time.monotonic())
