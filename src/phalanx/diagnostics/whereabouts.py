"""Where a missing rank is instead: in this group, or in another one that this process and that rank are both in."""

from __future__ import annotations

import time
import weakref
from typing import Protocol

from phalanx.diagnostics.flight_recorder import read, story
from phalanx.symmetric_memory.memory import Arena


class Seen(Protocol):
    """A group of this process whose memory can be read."""

    group: str
    arena: Arena


_groups: weakref.WeakSet[Seen] = weakref.WeakSet()


def remember(group: Seen) -> None:
    """Look into this group too, as long as it lives."""
    _groups.add(group)


def whereabouts(arena: Arena, rank: int) -> str:
    """One clause: what `rank` did last in this group, and in which other group it is waiting now, if it is in one."""
    here = story(arena.core, rank)
    there = _waits_in_another(arena, rank)
    return f"{here}; {there}" if there else here


def _waits_in_another(arena: Arena, rank: int) -> str:
    process = arena.process_of(rank)
    for group in list(_groups):
        if group.arena is arena or group.arena.closed:
            continue
        number = group.arena.rank_of(process)
        records = read(group.arena.core, number) if number is not None else []
        if records and records[-1].leave_ns == 0:
            last = records[-1]
            seconds = (time.monotonic_ns() - last.enter_ns) / 1e9
            return f"it is in {last.place} of group {group.group!r} for {seconds:.1f} s"
    return ""
