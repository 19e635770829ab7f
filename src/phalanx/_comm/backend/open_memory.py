"""Open the memory that the ranks of one host share: the first rank creates it, and the others fetch it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import describe_limit
from phalanx._base.ipc.local_listener import LocalAddress
from phalanx._base.loss_detection import AFTER_BREAK_S
from phalanx._base.processes import describe_address_space
from phalanx._comm.backend.rendezvous import agent_address
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.rendezvous.bootstrap import check_formation
from phalanx._comm.rendezvous.rank_info import RankInfo
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError

_PAUSE_S = 0.01


def open_symmetric_memory(
    server: FdServer,
    infos: Sequence[RankInfo],
    local_ranks: Sequence[int],
    options: Any,
    deadline: Deadline,
    idle: Callable[[float], None],
) -> Any:
    """Open the memory that `local_ranks`, the group's ranks on this host, share; the first of them creates it."""
    from phalanx._comm.symmetric_memory.memory import (  # imported here, because it needs the C core
        STAGE_BYTES,
        STAGE_BYTES_BETWEEN_HOSTS,
        LocalRank,
        open_as_leader,
        open_as_member,
    )

    rank, name = options.group_rank, options.group_id
    # In a group on several hosts, an engine's thread runs while a rank waits, and needs a core even if the rank spins.
    is_one_host = len(local_ranks) == len(infos)
    threads, stage_bytes = (1, STAGE_BYTES) if is_one_host else (2, STAGE_BYTES_BETWEEN_HOSTS)
    members = [LocalRank(infos[r].process, infos[r].cpus, threads) for r in local_ranks]
    here = f"init_process_group of group {name!r} on rank {rank}"

    def check_ranks(which: Iterable[int]) -> None:
        """Check that the local ranks `which` have not ended, and call `check_formation`."""
        check_formation()
        for who in (local_ranks[i] for i in sorted(which)):
            if infos[who].process.has_ended():
                how = f"rank {who} ({infos[who]}) joined, but ended before the group was formed"
                raise PeerLostError(f"{here}: {how}.\nRead its log first.", ranks=(who,))

    try:
        if rank == local_ranks[0]:
            register = _registration(infos, local_ranks, options)
            if not all(_sees_processes(infos[rank], infos[r]) for r in local_ranks):
                server.open_to_containers()
            return open_as_leader(
                server, members, deadline, check_ranks, idle, stage_bytes=stage_bytes, register=register
            )
        address = LocalAddress.parse(infos[local_ranks[0]].token)
        if not _sees_processes(infos[local_ranks[0]], infos[rank]):
            address = address.for_containers
        return open_as_member(address, local_ranks.index(rank), members, deadline, idle, check=lambda: check_ranks([0]))
    except DeadlineError as error:
        missing = tuple(local_ranks[r] for r in error.missing)
        what = f"{name_ranks(missing)} did not fetch the shared memory of this host" if missing else str(error)
        raise DeadlineError(f"{here}: {what}.\nRead the log of the missing rank first.", missing=missing) from None
    except PeerLostError:
        raise
    except (PhalanxError, OSError, MemoryError) as error:
        patience = Deadline.after(AFTER_BREAK_S if rank != local_ranks[0] else 0.0)
        patience.wait_until(lambda: False, _PAUSE_S, check=lambda: check_ranks([0]))
        raise PhalanxError(_no_memory(error, rank, local_ranks, name)) from None


def _sees_processes(leader: RankInfo, member: RankInfo) -> bool:
    """Return whether `member` sees the leader's process under the same pid."""
    return bool(leader.process.namespace) and leader.process.namespace == member.process.namespace


def _no_memory(error: PhalanxError | OSError | MemoryError, rank: int, local_ranks: Sequence[int], name: str) -> str:
    if isinstance(error, MemoryError):  # Python's own, which has no text
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    said = error.strerror if isinstance(error, OSError) else error
    leader = local_ranks[0]
    what_to_do = advice(error.errno) if isinstance(error, OSError) else ""
    if not what_to_do and rank != leader:
        what_to_do = f"If rank {leader}, the leader of this host, has ended, read its log."
    return f"init_process_group of group {name!r} on rank {rank}: {said}.\n{what_to_do}".rstrip()


def advice(number: int | None) -> str:
    """Return advice for the error number of a lack of descriptors or memory; "" for any other error."""
    return {
        errno.EMFILE: f"A group needs one open file for each rank of the host, and a few more. {describe_limit()}",
        errno.ENFILE: "The machine's limit on open files is reached (fs.file-max).",
        errno.ENOMEM: describe_address_space() or "Free memory, or raise the container's memory limit.",
    }.get(number or 0, "")


def _registration(
    infos: Sequence[RankInfo], local_ranks: Sequence[int], options: Any
) -> Callable[[int], object] | None:
    """Return a function that registers the group's memory with the agent; None if there is no agent.

    The agent of `phalanx run` reads the flight recorder in that memory.
    """
    agent = agent_address()
    if not agent:
        return None
    from phalanx._comm.diagnostics.observer import GroupInfo, register_group

    numbers = list(options.global_ranks_in_group) or range(len(infos))
    group_info = GroupInfo(
        options.group_id,
        len(infos),
        tuple(numbers[r] for r in local_ranks),
        tuple(infos[r].process.pid for r in local_ranks),
    )
    return lambda control: register_group(agent, group_info, control)
