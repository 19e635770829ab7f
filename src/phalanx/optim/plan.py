"""Plan which rank updates which elements of the parameters. All functions are pure.

             w1                        b1     w2
memory   [ . . . . . . . . . . . . ][ . .  ][ . . . . . . . . ]     each parameter starts on a line of 128 bytes
cut        rank 0| rank 1 | rank 2    0    0   1  |  1   |  2       equal ranges of lines; small ones count as one
whole      rank 0                    rank 1     rank 1              each parameter to one rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx._comm.backend.gradient_shards import LARGE_BYTES

# Cuts are at multiples of LINE bytes from the parameter's start. torch's kernels process two vector registers, at most
# 128 bytes, at a time, and the remainder element by element; the two paths may round differently (fused SGD's do).
# With such cuts every element takes the same path as in an uncut parameter, so the result is bitwise identical. Also,
# no two ranks write to one cache line.
LINE = 128


@dataclass(frozen=True)
class ParameterExtent:
    """A `ParameterExtent` has the size of a parameter: `numel` elements of `itemsize` bytes."""

    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def num_lines(self) -> int:
        """Return the parameter's size in lines of memory."""
        return -(-self.nbytes // LINE)


@dataclass(frozen=True)
class Slice:
    """A `Slice` is the elements `start` to `stop`, in memory order, of parameter number `index` of a group."""

    index: int
    start: int
    stop: int


Plan = tuple[tuple[Slice, ...], ...]
"""The slices of each rank. Every element of every parameter is in exactly one slice."""


def plan_offsets(extents: Sequence[ParameterExtent]) -> tuple[list[int], int]:
    """Return the offset of each parameter in the memory of its group, and the total size, in bytes."""
    offsets, at = [], 0
    for extent in extents:
        offsets.append(at)
        at += extent.num_lines * LINE
    return offsets, at


def plan_cut(extents: Sequence[ParameterExtent], world_size: int) -> Plan:
    """Cut each large parameter into equal ranges of lines; cut all small ones, laid end to end, as one parameter.

    Every rank thus has an equal share of each large gradient to reduce when that gradient is ready. Empty parameters go
    to rank 0.
    """
    small = [index for index, extent in enumerate(extents) if extent.nbytes < LARGE_BYTES]
    rows = [[index] for index, extent in enumerate(extents) if extent.nbytes >= LARGE_BYTES] + [small]
    plan = []
    for rank in range(world_size):
        slices = [part for row in rows for part in _cut(extents, row, rank, world_size)]
        plan.append(tuple(sorted(slices, key=lambda part: part.index)))
    return tuple(plan)


def _cut(extents: Sequence[ParameterExtent], row: Sequence[int], rank: int, world_size: int) -> Iterator[Slice]:
    """Yield one rank's part of the parameters in `row`, laid end to end."""
    total = sum(extents[index].num_lines for index in row)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    at = 0
    for index in row:
        extent = extents[index]
        per_line = LINE // extent.itemsize
        first, last = max(low - at, 0), min(high - at, extent.num_lines)
        if first < last:
            yield Slice(index, first * per_line, min(last * per_line, extent.numel))
        elif extent.numel == 0 and rank == 0:
            yield Slice(index, 0, 0)
        at += extent.num_lines


def plan_waves(sizes: Sequence[int], most: int) -> list[range]:
    """Group consecutive `sizes` into runs of at most `most` bytes, or of one larger size; return at least one run."""
    waves, start, nbytes = [], 0, 0
    for position, size in enumerate(sizes):
        if position > start and nbytes + size > most:
            waves.append(range(start, position))
            start, nbytes = position, 0
        nbytes += size
    return [*waves, range(start, len(sizes))]


def plan_whole(extents: Sequence[ParameterExtent], world_size: int) -> Plan:
    """Assign each parameter to one rank: the largest first, each to the rank with the fewest bytes so far."""
    loads = [0] * world_size
    ranks: list[list[Slice]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(extents)), key=lambda i: -extents[i].num_lines):
        rank = loads.index(min(loads))
        loads[rank] += extents[index].num_lines
        ranks[rank].append(Slice(index, 0, extents[index].numel))
    return tuple(tuple(sorted(slices, key=lambda s: s.index)) for slices in ranks)
