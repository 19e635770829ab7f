"""Share a group's control memory with the agent of `phalanx run`, which can read it while ranks hang or are dead.

    first rank of the host ──a message: the group, and the descriptor of its control memory──▶ agent

No process waits: if no agent answers, the group is not observed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from phalanx._base.core_numbers import ABSENT, LEFT
from phalanx._base.ipc.agent import notify, request
from phalanx._comm.diagnostics.flight_recorder import Record, read

if TYPE_CHECKING:
    from phalanx import _core

_FETCH_S = 5.0


@dataclass(frozen=True)
class GroupInfo:
    """A `GroupInfo` has a group's name and world size, and the job ranks and process IDs of its ranks on this host."""

    name: str
    world_size: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True)
class RankLog:
    """A `RankLog` has one rank's operations in a group, whether it has joined (`came`) and left, and why it left."""

    rank: int
    pid: int
    came: bool
    left: bool
    exit_reason: str
    records: tuple[Record, ...]


@dataclass(frozen=True)
class GroupLog:
    """A `GroupLog` has the operations of this host's ranks in a group, at most the last 128 of each rank."""

    name: str
    world_size: int
    ranks: tuple[RankLog, ...]


def register_group(agent: str, group_info: GroupInfo, control: int) -> bool:
    """Send the control memory's descriptor to the agent at `agent` ("name:token"); return False if that fails.

    This costs a connection and a message, about 20 µs, and never waits.
    """
    return notify(agent, "group", fds=[control], **asdict(group_info))


def fetch_store(agent: str) -> int | None:
    """Return the descriptor of the job's store from the agent at `agent`, or None; the caller owns it.

    Ranks that cannot see the agent's process in their /proc need this.
    """
    return next(iter(request(agent, "store", _FETCH_S)), None)


class Observer:
    """An `Observer` is the agent's read-only view of one group. It owns the descriptor `control`.

    Raises:
        ValueError: the memory has another version, or another number of ranks.
        OSError: the memory cannot be mapped.
    """

    def __init__(self, group_info: GroupInfo, control: int) -> None:
        self.group_info = group_info
        self.control = control
        self.read()

    def read(self) -> GroupLog:
        """Return what the ranks have recorded so far, as far as it has not been overwritten."""
        group_info = self.group_info
        with self._mapped() as core:
            return GroupLog(
                group_info.name, group_info.world_size, tuple(self._log(core, i) for i in range(len(group_info.ranks)))
            )

    def is_over(self) -> bool:
        """Return whether every rank has left, so that no record will be added."""
        with self._mapped() as core:
            return all(core.state(i)[0] == LEFT for i in range(len(self.group_info.ranks)))

    @contextmanager
    def _mapped(self) -> Iterator[_core.Group]:
        from phalanx import _core  # imported here, because the agent starts before it needs the core

        nbytes = os.fstat(self.control).st_size
        address = _core.map(self.control, nbytes)
        try:
            nobody = (-1,) * len(self.group_info.ranks)
            core = _core.Group(address, nbytes, 0, 0, 0, nobody, nobody, None)
            try:
                yield core
            finally:
                core.abandon()  # not `close`, which would record that rank 0 has left
        finally:
            _core.unmap(address, nbytes)

    def _log(self, core: _core.Group, index: int) -> RankLog:
        life, _, _, _, _, reason = core.state(index)
        records = read(core, index)
        ranks = self.group_info.ranks
        if len(ranks) == self.group_info.world_size:  # peers have group numbers; users know the job's numbers
            records = [
                replace(
                    record,
                    peer=ranks[record.peer] if 0 <= record.peer < len(ranks) else record.peer,
                    root=ranks[record.root] if 0 <= record.root < len(ranks) else record.root,
                )
                if record.peer >= 0 or record.root >= 0
                else record
                for record in records
            ]
        return RankLog(ranks[index], self.group_info.pids[index], life != ABSENT, life == LEFT, reason, tuple(records))

    def close(self) -> None:
        """Close the descriptor of the memory."""
        os.close(self.control)
