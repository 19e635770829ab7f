"""The flight recorder as people read it: what each rank did last, and what it is doing now."""

from __future__ import annotations

import time
from dataclasses import dataclass

from phalanx import _core
from phalanx.dtypes import dtype_name, reduction_name

# Names and numbers are those of enum plx_kind in csrc/layout.h.
KINDS = {
    1: "barrier",
    2: "broadcast",
    3: "all_reduce",
    4: "reduce",
    5: "all_gather",
    6: "gather",
    7: "scatter",
    8: "reduce_scatter",
    9: "all_to_all",
    10: "send",
    11: "recv",
    12: "gradients",
}
_REDUCES = (3, 4, 8)
_ROOTED = (2, 4, 6, 7)


@dataclass(frozen=True)
class Record:
    """One operation of one rank. Times are CLOCK_MONOTONIC nanoseconds; `leave_ns` is 0 while it runs."""

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
    site: str

    @property
    def name(self) -> str:
        """The operation's name."""
        return KINDS.get(self.kind, f"operation {self.kind}")

    @property
    def is_collective(self) -> bool:
        """Whether the whole group takes part."""
        return self.kind not in (10, 11)

    @property
    def label(self) -> str:
        """'all_reduce #42', or 'send to rank 1'."""
        if self.kind == 10:
            return f"send to rank {self.peer}"
        if self.kind == 11:
            return f"recv from rank {self.peer}" if self.peer >= 0 else "recv from any rank"
        return f"{self.name} #{self.seq}"

    def call(self) -> str:
        """The call as its rank made it: 'all_reduce(SUM) of float32 (3, 4) at train.py:88'."""
        options = []
        if self.kind in _REDUCES:
            options.append(reduction_name(self.redop))
        if self.kind in _ROOTED:
            options.append(f"{'src' if self.kind in (2, 7) else 'dst'}={self.root}")
        text = self.name + (f"({', '.join(options)})" if options else "")
        if self.kind != 1:
            text += f" of {dtype_name(self.dtype)} {tuple(self.shape)}"
        return f"{text} at {self.site}" if self.site else text


def read(core: _core.Group, rank: int) -> list[Record]:
    """The last operations of `rank`, oldest first; it may be running, hanging or dead."""
    return [Record(*record) for record in core.records(rank)]


def story(core: _core.Group, rank: int) -> str:
    """One clause on where `rank` is: 'is in all_reduce #42 (train.py:88) for 3.1 s'."""
    records = read(core, rank)
    if not records:
        return "has called nothing yet"
    last = records[-1]
    place = f" ({last.site})" if last.site else ""
    if last.leave_ns == 0:
        seconds = (time.monotonic_ns() - last.enter_ns) / 1e9
        return f"is in {last.label}{place} for {seconds:.1f} s"
    return f"last finished {last.label}{place}"
