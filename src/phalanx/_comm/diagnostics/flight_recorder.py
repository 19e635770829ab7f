"""Read the flight recorder: each rank's last operations, and its current one. This module does not need torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx._base.core_numbers import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    BROADCAST_BUFFERS,
    DTYPE_NAMES,
    GATHER,
    GRADIENTS,
    KIND_NAMES,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCTION_NAMES,
    SCATTER,
    SEND,
    STATUS_NAMES,
)

if TYPE_CHECKING:
    from phalanx import _core

_REDUCES = (ALL_REDUCE, REDUCE, REDUCE_SCATTER)
_FROM_ROOT = (BROADCAST, SCATTER, BROADCAST_BUFFERS)
_TO_ROOT = (REDUCE, GATHER)


@dataclass(frozen=True)
class RankPosition:
    """A `RankPosition` says where a rank is: in its `seq`-th collective, `operation`, for `seconds`, or past it."""

    seq: int = 0
    operation: str = ""  # 'all_reduce #42 (train.py:88)'; empty if it has called nothing
    inside: bool = False
    seconds: float = 0.0
    failed: bool = False
    elsewhere: str = ""  # the operation of another group in which it now waits

    def __str__(self) -> str:
        """Return one clause: 'has been in all_reduce #42 (train.py:88) for 3.1 s'."""
        if not self.operation:
            here = "has called nothing yet"
        elif self.inside:
            here = f"has been in {self.operation} for {self.seconds:.1f} s"
        elif self.failed:
            here = f"was in {self.operation}, which failed"
        else:
            here = f"last finished {self.operation}"
        return f"{here}; it has been in {self.elsewhere}" if self.elsewhere else here


@dataclass(frozen=True)
class Record:
    """A `Record` is one operation of one rank. Times are CLOCK_MONOTONIC nanoseconds; `leave_ns` is 0 while it runs."""

    seq: int
    kind: int
    dtype: int
    redop: int
    root: int
    peer: int
    count: int
    shape: tuple[int, ...]
    enter_ns: int
    leave_ns: int
    status: int
    call_site: str
    flags: int = 0

    @property
    def name(self) -> str:
        return KIND_NAMES.get(self.kind, f"operation {self.kind}")

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES.get(self.dtype, f"dtype {self.dtype}")

    @property
    def reduction(self) -> str:
        """Return how elements are combined; "" if they are only moved."""
        return REDUCTION_NAMES.get(self.redop, f"reduction {self.redop}") if self.kind in _REDUCES else ""

    @property
    def status_name(self) -> str:
        """Return how the operation ended, or 'running'."""
        return STATUS_NAMES.get(self.status, f"status {self.status}") if self.leave_ns else "running"

    @property
    def is_collective(self) -> bool:
        """Return whether the whole group takes part."""
        return self.kind not in (SEND, RECV)

    @property
    def is_numbered_call(self) -> bool:
        """Return whether this is a collective that every rank counts; gradient rounds are numbered separately."""
        return self.is_collective and self.kind != GRADIENTS

    @property
    def label(self) -> str:
        """Return 'all_reduce #42', or 'send to rank 1'."""
        if self.kind == SEND:
            return f"send to rank {self.peer}"
        if self.kind == RECV:
            return f"recv from rank {self.peer}" if self.peer >= 0 else "recv from any rank"
        return f"{self.name} #{self.seq}"

    @property
    def place(self) -> str:
        """Return 'all_reduce #42 (train.py:88)'."""
        return f"{self.label} ({self.call_site})" if self.call_site else self.label

    def call(self) -> str:
        """Return the call with its arguments: 'all_reduce(SUM) of float32 (3, 4) at train.py:88'."""
        options = []
        if self.kind in _REDUCES:
            options.append(self.reduction)
        if self.kind in _FROM_ROOT or self.kind in _TO_ROOT:
            options.append(f"{'src' if self.kind in _FROM_ROOT else 'dst'}={self.root}")
        text = self.name + (f"({', '.join(options)})" if options else "")
        if self.kind not in (BARRIER, GRADIENTS):
            text += f" of {self.dtype_name} {tuple(self.shape)}"
        return f"{text} at {self.call_site}" if self.call_site else text


def read(core: _core.Group, rank: int) -> list[Record]:
    """Return the last operations of `rank`, oldest first; the rank may be running, hanging or dead."""
    return [Record(*record) for record in core.records(rank)]


def position_of(records: Sequence[Record], now_ns: int) -> RankPosition:
    """Return the position, at time `now_ns`, of a rank whose last operations are `records`."""
    if not records:
        return RankPosition()
    last = records[-1]
    inside = last.leave_ns == 0
    seconds = (now_ns - last.enter_ns) / 1e9 if inside else 0.0
    return RankPosition(last.seq, last.place, inside, seconds, failed=not inside and last.status != 0)


def read_position(core: _core.Group, rank: int) -> RankPosition:
    """Return where `rank` is now; the rank may be running, hanging or dead."""
    return position_of(read(core, rank), time.monotonic_ns())
