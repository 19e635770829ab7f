"""Hand out the indices that one rank reads in one epoch, one by one, and count how many have gone."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.data.ordered import Order
from phalanx.data.partition import Partition
from phalanx.data.permutation import Indices

BLOCK = 8192  # indices computed at once: 64 KiB an array, so that a block's arithmetic stays in the core's own cache


class IndexStream:
    """`IndexStream` is one pass of one rank over its partition of an epoch; `order` None means the dataset's own order.

    Cost: memory of one block, whatever the partition's size. Iteration runs in C between blocks: nothing is counted per
    index, because the list iterator that is being read knows how many it still has.
    """

    def __init__(self, partition: Partition, order: Order | None) -> None:
        self.partition = partition
        self._order = order
        self._computed = 0
        self._block: Iterator[int] = iter(())

    @property
    def taken(self) -> int:
        """Return how many indices have been handed out."""
        return self._computed - operator.length_hint(self._block)

    @property
    def length(self) -> int:
        """Return how many indices the pass has."""
        return self.partition.count

    @property
    def is_over(self) -> bool:
        """Return whether all of the partition has been handed out."""
        return self.taken >= self.partition.count

    def blocks(self) -> Iterator[Iterator[int]]:
        """Yield iterators over the consecutive blocks; chained together they are the pass."""
        while self._computed < self.partition.count:
            size = min(BLOCK, self.partition.count - self._computed)
            indices = self.compute(self._computed, size).tolist()
            self._computed += size
            self._block = iter(indices)
            yield self._block

    def compute(self, first: int, size: int) -> Indices:
        partition = self.partition
        return _take(partition.start + first * partition.step, partition.step, size, partition.length, self._order)


class TurnStream:
    """`TurnStream` is one pass over several partitions by turns: `turn` indices of the first, as many of the next ...

    The first is the longest; the others may have one index fewer (without padding).
    After a turn that is shorter, at the end, it says once that it is over, and goes on when it is asked again: there
    PyTorch's `BatchSampler` ends the batch, so that no batch has samples of two partitions.
    """

    def __init__(self, streams: Sequence[IndexStream], turn: int) -> None:
        self.partition = streams[0].partition
        self._streams, self._turn = streams, turn
        self._number = 0  # the number of the turn that comes next
        self._block: Iterator[int] = iter(())
        self._is_short = False

    @property
    def length(self) -> int:
        """Return how many indices the pass has."""
        return sum(stream.partition.count for stream in self._streams)

    @property
    def turns(self) -> int:
        """Return how many turns have been begun."""
        return self._number

    @property
    def taken(self) -> int:
        """Return how many indices of each partition were handed out, counting rounds in which all had their turn."""
        return min(self._number // len(self._streams) * self._turn, self.partition.count)

    @property
    def is_over(self) -> bool:
        """Return whether all has been handed out."""
        return self.taken >= self.partition.count

    def __next__(self) -> int:
        for index in self._block:
            return index
        if self._is_short:
            self._is_short = False
            raise StopIteration
        if not (size := self._size_of_turn()):
            raise StopIteration
        turn, which = divmod(self._number, len(self._streams))
        self._block = iter(self._streams[which].compute(turn * self._turn, size).tolist())
        self._number += 1
        self._is_short = size < self._turn
        while self._number % len(self._streams) and not self._size_of_turn():  # these have no index left
            self._number += 1
        return next(self._block)

    def _size_of_turn(self) -> int:
        """Return how many indices the next turn has."""
        turn, which = divmod(self._number, len(self._streams))
        return max(0, min(self._turn, self._streams[which].partition.count - turn * self._turn))


class ShareStream:
    """`ShareStream` is one reader's pass if readers outnumber partitions: all readers share each step's samples.

    A step has `turn` samples of each partition; they stand one behind the other in the epoch's order:

        position   0  1  2  3  4  5  6  7  8  9 10 11      two partitions, turns of three: steps of six samples
        reader     0  1  2  3  0  1  0  1  2  3  0  1      four readers

    A reader for which a step has no sample is handed the step's first one: `shares` says that it has no weight. A share
    that is less than `turn` ends with a StopIteration, at which PyTorch's `BatchSampler` ends the batch; not where the
    loader leaves out what is short (`drops_last`), which must be told the size of a share.
    """

    def __init__(
        self, partition: Partition, order: Order | None, turn: int, reader: int, readers: int, *, drops_last: bool
    ) -> None:
        self.partition = partition
        self._order, self._turn = order, turn
        self._reader, self._readers = reader, readers
        self._drops_last = drops_last
        self._num_steps = partition.count // turn if drops_last else -(-partition.count // turn)
        self._number = 0  # the number of the step that comes next
        self._block: Iterator[int] = iter(())
        self._is_short = False

    @property
    def length(self) -> int:
        """Return how many indices a partition has."""
        return self.partition.count

    @property
    def taken(self) -> int:
        """Return how many indices of each partition have been handed out, with the other readers' shares."""
        return min(self._number * self._turn, self.partition.count)

    @property
    def is_over(self) -> bool:
        """Return whether all has been handed out."""
        return self._number >= self._num_steps

    @property
    def latest(self) -> int:
        """Return the number of the step that was begun last."""
        return self._number - 1

    def shares(self, step: int) -> tuple[int, int]:
        """Return how many of a step's samples this reader has, and how many there are."""
        whole = self.partition.world_size * max(0, min(self._turn, self.partition.count - step * self._turn))
        return -(-max(0, whole - self._reader) // self._readers), whole

    def __next__(self) -> int:
        for index in self._block:
            return index
        if self._is_short or self.is_over:
            self._is_short = False
            raise StopIteration
        partition, size = self.partition, self.shares(self._number)[0]
        first = partition.consumed + self._number * self._turn * partition.world_size + (self._reader if size else 0)
        size = max(size, 1)
        self._block = iter(_take(first, self._readers, size, partition.length, self._order).tolist())
        self._number += 1
        self._is_short = size < self._turn and not self._drops_last
        return next(self._block)


def _take(first: int, step: int, size: int, length: int, order: Order | None) -> Indices:
    """Return the indices at `size` positions of an order; positions behind its end stand for its beginning again."""
    positions = np.arange(size, dtype=np.uint64)
    positions *= np.uint64(step)
    positions += np.uint64(first)
    if first + (size - 1) * step >= length:
        positions %= np.uint64(length)
    return positions if order is None else order.take(positions)
