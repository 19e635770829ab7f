"""Keep the process of each rank of this host, and the files into which it writes its stacks, or why it died."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from phalanx._job.agent.failure import Exit
from phalanx._job.agent.scratch import create_scratch
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.output.pump import Pump

_MAX_DUMP_BYTES = 1 << 16


class RankProcesses:
    """`RankProcesses` keeps processes by rank: the number that each started with. It holds two descriptors each."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.stacks: dict[int, int] = {}  # descriptors of files
        self.lost_ns: dict[int, int] = {}  # by process: when it ended, if it was lost and the job has gone on
        self._dumps: dict[int, int] = {}

    def fork(
        self,
        rank: int,
        environment: Mapping[str, str],
        cpus: Sequence[int],
        reports: int,
        zygote: ZygoteProcess,
        pump: Pump,
    ) -> None:
        """Fork a process that is known by `rank`: the first one, or one that replaces it.

        Raises:
            OSError: there are no more descriptors.
        """
        for old in (self._dumps, self.stacks):
            if rank in old:
                os.close(old.pop(rank))
        dump = self._dumps[rank] = create_scratch("phalanx-dump")
        stacks = self.stacks[rank] = create_scratch("phalanx-stacks")
        ends = []
        try:
            for stream in (1, 2):
                ours, its = os.pipe()
                ends.append(its)
                pump.add(rank, stream, ours)
            zygote.fork(rank, environment, cpus, [*ends, reports, dump, stacks])
        finally:
            for end in ends:
                os.close(end)

    def read_dump(self, rank: int) -> str:
        """Return where the process was when a signal ended it."""
        return os.pread(self._dumps[rank], _MAX_DUMP_BYTES, 0).decode(errors="replace")

    def lose(self, exit: Exit) -> None:
        """Forget a process that has ended while the job goes on without it."""
        self.pids.pop(exit.rank, None)
        self.lost_ns[exit.pid] = int(exit.at * 1e9)

    def close(self) -> None:
        for fd in (*self._dumps.values(), *self.stacks.values()):
            os.close(fd)
