"""List the groups that this process has created and not left, and leave them when the process ends."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group.group import PhalanxProcessGroup

_groups: weakref.WeakSet[PhalanxProcessGroup] = weakref.WeakSet()
_numbers = itertools.count()


def next_number() -> int:
    """Return the number of the next group."""
    return next(_numbers)


def add(group: PhalanxProcessGroup) -> None:
    """Add a group to the open groups."""
    _groups.add(group)


def discard(group: PhalanxProcessGroup) -> None:
    """Remove a group from the open groups, if it is one."""
    _groups.discard(group)


def open_groups() -> list[PhalanxProcessGroup]:
    """Return the groups that this process has not left, oldest first."""
    return sorted(_groups, key=lambda group: group.number)


def leave_all(exit_reason: str) -> None:
    """Leave every open group at the end of the process, and report `exit_reason` to its members."""
    for group in open_groups():
        group.leave_at_exit(exit_reason)
