"""Track the ranks that have outlived the zygote which forked them; the agent, which adopts orphans, is their parent.

    before                        the zygote is killed              a loss later
    agent                         agent                             agent
      └─ zygote A                   ├─ rank 0, rank 1  (adopted)      ├─ rank 0
           ├─ rank 0                └─ zygote B  (importing torch)    └─ zygote B
           └─ rank 1                                                       └─ rank 1, replaced

This process sees their ends, by SIGCHLD. When this process is killed, the kernel ends them
(`phalanx.elastic.channel`), and the new zygote ends what they have started, by the session of the old one.
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
    """The end of an adopted rank, in the form in which the zygote would have reported it."""

    rank: int
    pid: int
    status: int
    at: float


class AdoptedRanks:
    """`AdoptedRanks` keeps the adopted ranks by process; `rank` is the number that a process was started with."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._sessions: dict[int, set[int]] = {}  # by zygote: its session, and the ranks of that session that live
        self.used = False  # set once a zygote has died: from then on orphans are adopted by this process

    @property
    def sessions(self) -> tuple[int, ...]:
        """Return the sessions of the zygotes whose ranks live."""
        return tuple(self._sessions)

    def __contains__(self, pid: int) -> bool:
        return pid in self._ranks

    def adopt(self, zygote: int, ranks: dict[int, int]) -> None:
        """Adopt the ranks of a zygote that has died; `ranks` is by process."""
        self.used = True
        self._ranks.update(ranks)
        if ranks:
            self._sessions[zygote] = set(ranks)

    def signal(self, signum: int, ranks: Iterable[int], *, group: bool) -> None:
        """Send `signum` to the adopted ones among `ranks`."""
        wanted = set(ranks)
        signal_children([pid for pid, rank in self._ranks.items() if rank in wanted], signum, group=group)

    def reap(self, zygote: int) -> Iterator[AdoptedExit]:
        """Yield the ends of adopted ranks that have ended. The child `zygote` is not reaped: its parent object does it.

        What a rank that failed leaves in its process group is killed; orphans are buried.
        """
        for pid, status in reap_children(spared=zygote):
            if pid in self._ranks and status != 0:
                signal_children([pid], signal.SIGKILL, group=True)
            yield from self._bury(pid, status)

    def sweep(self, zygote: int) -> Iterator[AdoptedExit]:
        """Kill the adopted ranks, and all descendants of this process that are not below `zygote`; yield their ends."""
        for pid, status in kill_descendants(list(self._ranks), spared=zygote).items():
            yield from self._bury(pid, os.waitstatus_to_exitcode(status))

    def _bury(self, pid: int, status: int) -> Iterator[AdoptedExit]:
        rank = self._ranks.pop(pid, None)
        if rank is None:
            return
        for session, living in list(self._sessions.items()):
            living.discard(pid)
            if not living:  # all processes of this session have ended; the rest belongs to no rank
                kill_sessions([session])
                del self._sessions[session]
        yield AdoptedExit(rank, pid, status, time.monotonic())
