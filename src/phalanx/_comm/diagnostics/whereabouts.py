"""Find out where the ranks of this host are, and how they ended, from the shared memory of their groups.

A missing rank may be waiting in another group that it shares with this process, so those groups are searched, too.
"""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from phalanx._base import core_numbers
from phalanx._comm.diagnostics.failure_report import KILLED, LEFT, ended_normally
from phalanx._comm.diagnostics.flight_recorder import RankPosition, read_position
from phalanx._comm.symmetric_memory.watch import wait_status

if TYPE_CHECKING:
    from phalanx import _core
    from phalanx._comm.symmetric_memory.memory import SymmetricMemory


class ObservedGroup(Protocol):
    """An `ObservedGroup` is a group of this process whose memory can be read."""

    group: str
    symm_mem: SymmetricMemory


_groups: weakref.WeakSet[ObservedGroup] = weakref.WeakSet()


def register(group: ObservedGroup) -> None:
    """Search this group, too, for missing ranks, as long as the group exists."""
    _groups.add(group)


_listeners: list[Callable[[ObservedGroup], None]] = []


def listen_for_ends(listener: Callable[[ObservedGroup], None]) -> None:
    """Call `listener` with each group that this process is about to leave, while its memory can be read."""
    _listeners.append(listener)


def stop_listening(listener: Callable[[ObservedGroup], None]) -> None:
    """Stop calling `listener`."""
    if listener in _listeners:
        _listeners.remove(listener)


def notify_end(group: ObservedGroup) -> None:
    """Notify the listeners that this process is about to leave the group."""
    for listener in list(_listeners):
        listener(group)


def groups() -> list[ObservedGroup]:
    """Return the groups that exist."""
    return list(_groups)


def find_position(symm_mem: SymmetricMemory, rank: int) -> RankPosition:
    """Return the position of `rank` in this group, with the other group in which it now waits, if any."""
    here = read_position(symm_mem.core, rank)
    return replace(here, elsewhere=_waits_in_another(symm_mem, rank))


def _waits_in_another(symm_mem: SymmetricMemory, rank: int) -> str:
    process = symm_mem.process_of(rank)
    for group in list(_groups):
        if group.symm_mem is symm_mem or group.symm_mem.closed:
            continue
        number = group.symm_mem.rank_of(process)
        there = read_position(group.symm_mem.core, number) if number is not None else RankPosition()
        if there.inside:
            return f"{there.operation} of group {group.group!r} for {there.seconds:.1f} s"
    return ""


def late_ranks(core: _core.Group, rank: int, world_size: int) -> list[int]:
    """Return the ranks that have not reached the operation of `rank`."""
    mine = core.state(rank)[3]
    return [r for r in range(world_size) if core.state(r)[3] < mine]


def name_process(symm_mem: SymmetricMemory, rank: int) -> str:
    """Return a description of the process of `rank` for users: 'pid 17'."""
    theirs, ours = symm_mem.process_of(rank), symm_mem.process_of(symm_mem.rank)
    return f"pid {theirs.pid}" + (" in another pid namespace" if theirs.namespace != ours.namespace else "")


def describe_end(symm_mem: SymmetricMemory, rank: int) -> str:
    """Return how a rank's process ended, from the best source available."""
    life, _, _, _, _, exit_reason = symm_mem.core.state(rank)
    if exit_reason:
        return exit_reason
    if life == core_numbers.LEFT:
        return LEFT
    status = wait_status(symm_mem.process_of(rank))
    if status is None:
        return KILLED
    if status & 0x7F:
        number = status & 0x7F
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return f"killed by {name}"
    return f"it exited with code {status >> 8}"


def has_finished(symm_mem: SymmetricMemory, rank: int) -> bool:
    """Return whether a rank's program has finished, so that the rank has left or its process has ended."""
    life, _, _, _, _, exit_reason = symm_mem.core.state(rank)
    if exit_reason or life == core_numbers.LEFT:
        return not exit_reason or ended_normally(exit_reason)
    return not symm_mem.core.alive(rank) and wait_status(symm_mem.process_of(rank)) == 0
