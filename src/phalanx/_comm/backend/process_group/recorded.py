"""Read the flight recorder's entries of a process's groups, including the groups that it has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx._comm.diagnostics.flight_recorder import Record

_MAX_LEFT = 64  # groups whose records are kept when the process has left them


@dataclass(frozen=True)
class RecordedGroup:
    """It is a group and this rank's last operations in it, oldest first.

    `number` tells it from the process's others.
    """

    number: int
    name: str
    desc: str
    rank: int
    global_ranks: tuple[int, ...]
    timeout_s: float
    records: Sequence[Record]


_left: deque[RecordedGroup] = deque(maxlen=_MAX_LEFT)


def read_group(group: Any) -> RecordedGroup:
    """Return what the flight recorder holds of this `ProcessGroupBase` now."""
    return RecordedGroup(
        group.number,
        group.group_name,
        group.group_desc,
        group.rank(),
        tuple(group._global_ranks),
        group._timeout_s,
        group.transport.records(),
    )


def keep_records(group: Any) -> None:
    """Keep what is recorded of a group that the process is about to leave; its memory goes with it."""
    recorded = read_group(group)
    if recorded.records:
        _left.append(recorded)


def left_groups() -> list[RecordedGroup]:
    """Return what is kept of the groups that this process has left, in the order in which it left them."""
    return list(_left)
