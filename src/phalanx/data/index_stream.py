"""The indices that one rank reads in one epoch, handed out one by one while counting how many have gone."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

from phalanx.data.partition import Partition
from phalanx.data.permutation import Indices, Permutation

BLOCK = 8192  # indices computed at once: 64 KiB an array, so that a block's arithmetic stays in the core's own cache


class IndexStream:
    """One pass of one rank over its partition of an epoch; `order` None means the dataset's own order.

    Cost: memory of one block, whatever the partition's size. Iteration runs in C between blocks: nothing is counted per
    index, because the list iterator that is being read knows how many it still has.
    """

    def __init__(self, partition: Partition, order: Permutation | None) -> None:
        self.partition = partition
        self._order = order
        self._computed = 0
        self._block: Iterator[int] = iter(())

    @property
    def taken(self) -> int:
        """How many indices have been handed out."""
        return self._computed - operator.length_hint(self._block)

    @property
    def is_over(self) -> bool:
        """Whether all of the partition has been handed out."""
        return self.taken >= self.partition.count

    def blocks(self) -> Iterator[Iterator[int]]:
        """Iterators over the consecutive blocks; chained together they are the pass."""
        while self._computed < self.partition.count:
            size = min(BLOCK, self.partition.count - self._computed)
            indices = self._compute(self._computed, size).tolist()
            self._computed += size
            self._block = iter(indices)
            yield self._block

    def _compute(self, first: int, size: int) -> Indices:
        partition = self.partition
        positions = np.arange(size, dtype=np.uint64)
        positions *= np.uint64(partition.step)
        positions += np.uint64(partition.start + first * partition.step)
        if partition.start + (first + size - 1) * partition.step >= partition.length:
            positions %= np.uint64(partition.length)
        return positions if self._order is None else self._order.take(positions)
