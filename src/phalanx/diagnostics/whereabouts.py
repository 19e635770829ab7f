"""Where a missing rank is instead: in this group, or in another one that this process and that rank are both in."""

from __future__ import annotations

import time
import weakref
from typing import Protocol

from phalanx.diagnostics.flight_recorder import describe_position, read
from phalanx.symmetric_memory.memory import SymmetricMemory


class Seen(Protocol):
    """A group of this process whose memory can be read."""

    group: str
    symm_mem: SymmetricMemory


_groups: weakref.WeakSet[Seen] = weakref.WeakSet()


def remember(group: Seen) -> None:
    """JobSnapshot into this group too, as long as it lives."""
    _groups.add(group)


def whereabouts(symm_mem: SymmetricMemory, rank: int) -> str:
    """One clause: what `rank` did last in this group, and in which other group it is waiting now, if it is in one."""
    here = describe_position(symm_mem.core, rank)
    there = _waits_in_another(symm_mem, rank)
    return f"{here}; {there}" if there else here


def _waits_in_another(symm_mem: SymmetricMemory, rank: int) -> str:
    process = symm_mem.process_of(rank)
    for group in list(_groups):
        if group.symm_mem is symm_mem or group.symm_mem.closed:
            continue
        number = group.symm_mem.rank_of(process)
        records = read(group.symm_mem.core, number) if number is not None else []
        if records and records[-1].leave_ns == 0:
            last = records[-1]
            seconds = (time.monotonic_ns() - last.enter_ns) / 1e9
            return f"it is in {last.place} of group {group.group!r} for {seconds:.1f} s"
    return ""
