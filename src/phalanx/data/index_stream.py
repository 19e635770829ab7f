"""Yield the indices that one rank reads in one epoch, and count the yielded ones."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

from phalanx.data.ordered import IndexOrder
from phalanx.data.partition import Partition
from phalanx.data.permutation import Indices

BLOCK = 8192  # indices computed at once: 64 KiB per array, which fits in a core's cache


class IndexStream:
    """`IndexStream` is one pass of one rank over its partition of an epoch; `order` None is the dataset's own order.

    Cost: memory of one block, whatever the partition's size. Iteration runs in C within a block: no index is counted by
    itself, because the current list iterator knows how many are left.
    """

    def __init__(self, partition: Partition, order: IndexOrder | None) -> None:
        self.partition = partition
        self._order = order
        self._computed = 0
        self._block: Iterator[int] = iter(())

    @property
    def num_yielded(self) -> int:
        """Return the number of indices yielded so far."""
        return self._computed - operator.length_hint(self._block)

    @property
    def length(self) -> int:
        """Return the number of indices of the pass."""
        return self.partition.count

    @property
    def is_over(self) -> bool:
        """Return whether all of the partition was yielded."""
        return self.num_yielded >= self.partition.count

    def blocks(self) -> Iterator[Iterator[int]]:
        """Yield iterators over the consecutive blocks, which together are the pass."""
        while self._computed < self.partition.count:
            size = min(BLOCK, self.partition.count - self._computed)
            indices = self.compute(self._computed, size).tolist()
            self._computed += size
            self._block = iter(indices)
            yield self._block

    def compute(self, first: int, size: int) -> Indices:
        partition = self.partition
        return _compute_indices(
            partition.start + first * partition.step, partition.step, size, partition.length, self._order
        )


def _compute_indices(first: int, step: int, size: int, length: int, order: IndexOrder | None) -> Indices:
    """Return the indices at `size` positions of an order; positions past its end start again at its beginning."""
    positions = np.arange(size, dtype=np.uint64)
    positions *= np.uint64(step)
    positions += np.uint64(first)
    if first + (size - 1) * step >= length:
        positions %= np.uint64(length)
    return positions if order is None else order.take(positions)
