"""A case: one operation at one size, what goes in, what must come out, and the bytes that no implementation can avoid.

The size of a case is that of its larger buffer, as PyTorch users and nccl-tests count it: an all_gather of 1 MiB leaves
1 MiB on every rank, a reduce_scatter of 1 MiB starts from 1 MiB on every rank. Below one element per rank, each rank
contributes one element, so a 4 B all_gather between 2 ranks leaves 8 B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ELEMENT_BYTES = 4  # float32
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (4, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ROOT = 0
# What each rank can do for itself, all ranks at once: as much as the memory allows, since nothing is shared.
COPY, UPDATE = "copy", "update"  # one buffer into another; the negative of a buffer, in place
_PERIOD = 13  # of the value pattern; prime to every block size, so that a shifted block is noticed


@dataclass(frozen=True)
class Case:
    """One of `OPS`, or `COPY` or `UPDATE`, between `world_size` ranks, with `num_bytes` in its larger buffer."""

    op: str
    num_bytes: int
    world_size: int

    @property
    def block(self) -> int:
        """Elements that one rank contributes to, or keeps of, an operation that splits its buffer over the ranks."""
        return max(1, self.num_bytes // ELEMENT_BYTES // self.world_size)

    @property
    def source_count(self) -> int:
        """Elements that go in on each rank."""
        if self.op == "all_gather":
            return self.block
        return self.block * self.world_size if self._splits else self.num_bytes // ELEMENT_BYTES

    @property
    def target_count(self) -> int:
        """Elements that come out on each rank."""
        if self.op == "reduce_scatter":
            return self.block
        return self.block * self.world_size if self._splits else self.num_bytes // ELEMENT_BYTES

    @property
    def least_traffic(self) -> int:
        """Bytes read and written by all ranks together when each input is read once and each output written once."""
        sources = 1 if self.op == "broadcast" else self.world_size
        targets = self.world_size - 1 if self.op == "broadcast" else self.world_size
        return ELEMENT_BYTES * (sources * self.source_count + targets * self.target_count)

    @property
    def floor(self) -> Case:
        """What the memory alone can do in this case's place: the same buffers, read once and written once."""
        return Case(UPDATE if self.op == "all_reduce" else COPY, self.num_bytes, self.world_size)

    @property
    def _splits(self) -> bool:
        return self.op in ("all_gather", "reduce_scatter", "all_to_all")

    def source_values(self, rank: int) -> np.ndarray:
        """What `rank` puts in: small integers, so that every sum is exact in float32 in any order."""
        if self.op == "broadcast":
            return _pattern(self.source_count) * np.float32(1 if rank == ROOT else 0)
        if self.op in ("all_reduce", "all_gather", COPY, UPDATE):
            return _pattern(self.source_count) * np.float32(rank + 1)
        blocks = range(self.world_size)
        if self.op == "reduce_scatter":
            return np.concatenate([_pattern(self.block) * np.float32((rank + 1) * (to + 1)) for to in blocks])
        return np.concatenate([_pattern(self.block) * np.float32(rank * self.world_size + to + 1) for to in blocks])

    def target_values(self, rank: int) -> np.ndarray:
        """What must come out on `rank`."""
        if self.op == "broadcast":
            return _pattern(self.target_count)
        if self.op in (COPY, UPDATE):
            return self.source_values(rank) * np.float32(1 if self.op == COPY else -1)
        sum_of_ranks = self.world_size * (self.world_size + 1) // 2
        if self.op == "all_reduce":
            return _pattern(self.target_count) * np.float32(sum_of_ranks)
        if self.op == "reduce_scatter":
            return _pattern(self.block) * np.float32(sum_of_ranks * (rank + 1))
        blocks = range(self.world_size)
        if self.op == "all_gather":
            return np.concatenate([_pattern(self.block) * np.float32(of + 1) for of in blocks])
        return np.concatenate([_pattern(self.block) * np.float32(of * self.world_size + rank + 1) for of in blocks])


def _pattern(count: int) -> np.ndarray:
    """1 .. 13, again and again: 13 does not divide a block, so every element has a place."""
    repeats = -(-count // _PERIOD)
    return np.tile(np.arange(1, _PERIOD + 1, dtype=np.float32), repeats)[:count]
