"""The open groups are those that this process has made and not left; it leaves them when it ends."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group.group import PhalanxProcessGroup

_groups: weakref.WeakSet[PhalanxProcessGroup] = weakref.WeakSet()
_numbers = itertools.count()


def next_number() -> int:
    """Return the number of a group that is being made."""
    return next(_numbers)


def add(group: PhalanxProcessGroup) -> None:
    """Count a group as open from here on."""
    _groups.add(group)


def discard(group: PhalanxProcessGroup) -> None:
    """Count a group as open no more, if it was."""
    _groups.discard(group)


def open_groups() -> list[PhalanxProcessGroup]:
    """Return the groups that this process has not left, oldest first."""
    return sorted(_groups, key=lambda group: group.number)


def leave_all(exit_reason: str) -> None:
    """Leave every group that is still open, at the end of the process, and say why."""
    for group in open_groups():
        group.leave_at_exit(exit_reason)
