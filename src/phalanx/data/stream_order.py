"""Compute the order in which a job reads shards, a function of their lengths, a key and a `StreamLayout`.

    shards, shuffled          c a f d b e g h ...       assigned to lanes: each shard goes to the lane with the fewest
                                                        samples so far
    reader 0    lane 0        c c c c c c|g g g g       a lane is shuffled within windows of its shards
                lane 1        a a a a|h h h h h h
    reader 1    lane 2        f f f f f f f|...
                lane 3        d d d d d|...

    positions                 c a c a c a c a   f d f d f d f d   c a c a ...
                              └ a block of 8 ┘  └ the next one ┘              readers take turns with blocks,
                                                                              and lanes take turns inside a block

The order does not depend on ranks or workers. If a step of the job has as many samples as a block, each worker of a
DataLoader reads the lanes of one reader, because workers take turns with batches. If the number of ranks also divides
the number of lanes of a reader, each rank reads its own lanes, and no other process reads their shards. With other
numbers, the order is the same, but some shards are read by several processes.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phalanx.data.permutation import Indices, Permutation, WindowPermutations


@dataclass(frozen=True)
class StreamLayout:
    """`StreamLayout` is everything besides the data and the key on which the order depends.

    Each of `readers` readers has `interleave` lanes; a block has `block` samples, and a window `window` samples.

    Raises:
        ValueError: a number is below 1, or not an integer.
    """

    interleave: int
    readers: int
    block: int
    window: int

    def __post_init__(self) -> None:
        wrong = [f"{name}={n!r}" for name, n in asdict(self).items() if not isinstance(n, int) or n < 1]
        if wrong:
            raise ValueError(f"Stream: {', '.join(wrong)}: each must be a number of 1 or more")

    def fit(self, num_shards: int) -> StreamLayout:
        """Return the layout with fewer lanes and readers if there are too few shards for one in each lane."""
        interleave = max(1, min(self.interleave, num_shards))
        divisors = (d for d in range(self.readers, 0, -1) if self.readers % d == 0)
        readers = next((d for d in divisors if d * interleave <= num_shards), 1)
        return StreamLayout(interleave, readers, self.block, self.window)


class StreamOrder:
    """`StreamOrder` is the order of one epoch over shards of `lengths`; without a `key`, nothing is shuffled.

    A sample's index is its number, counted through all shards in the order given.

    Cost: a few numbers for each shard, computed once per epoch (milliseconds for 10,000 shards); then less than a
    microsecond per index in a batch of thousands.
    """

    def __init__(self, lengths: Indices, layout: StreamLayout, key: str | None) -> None:
        shards = np.arange(len(lengths), dtype=np.uint64)
        if key is not None:
            shards = Permutation(len(lengths), f"{key}, shards").take(shards)
        shards = shards[lengths[shards] > 0]
        layout = layout.fit(len(shards))
        lanes = assign_lanes(lengths[shards], layout.readers * layout.interleave)
        by_lane = np.argsort(lanes, kind="stable")
        self.length = int(lengths.sum())
        self._lengths, self._window = lengths, np.uint64(layout.window)
        self._begins = np.cumsum(lengths) - lengths  # the first index of each shard, among all samples
        self._shards = shards[by_lane]  # the shards by lane, and in each lane in reading order
        in_lanes = np.cumsum(lengths[self._shards])
        self._rows = in_lanes - lengths[self._shards]  # the first row of each shard, counted through all lanes
        totals = np.zeros(layout.readers * layout.interleave, dtype=np.uint64)
        np.add.at(totals, lanes, lengths[shards])
        self._lane_rows = (np.cumsum(totals) - totals).reshape(layout.readers, layout.interleave)
        of_readers = totals.reshape(layout.readers, layout.interleave)
        self._blocks = RoundRobin([int(one.sum()) for one in of_readers], layout.block)
        self._lanes = [RoundRobin(one.tolist(), 1) for one in of_readers]
        self._windows = None if key is None else WindowPermutations(f"{key}, windows")

    def take(self, positions: Indices) -> Indices:
        """Return the indices at `positions`; all are below `length`.

        Shape: `positions` and the result (n).
        """
        readers, numbers = self._blocks.locate(positions)
        rows = np.empty_like(positions)
        for reader in np.unique(readers):
            chosen = readers == reader
            lanes, places = self._lanes[reader].locate(numbers[chosen])
            rows[chosen] = self._lane_rows[reader][lanes] + places
        at = np.searchsorted(self._rows, rows, side="right") - 1
        shards, places = self._shards[at], rows - self._rows[at]
        if self._windows is not None:
            windows = places // self._window
            begins = windows * self._window
            lengths = np.minimum(self._window, self._lengths[shards] - begins)
            places = begins + self._windows.take(places - begins, lengths, (shards << np.uint64(32)) + windows)
        indices: Indices = np.add(self._begins[shards], places)
        return indices


def assign_lanes(lengths: Indices, num_lanes: int) -> Indices:
    """Return the lane of each shard: the next shard goes to the lane with the fewest samples so far."""
    if len(lengths) and (lengths == lengths[0]).all():
        lanes: Indices = np.arange(len(lengths), dtype=np.uint64) % np.uint64(num_lanes)
        return lanes
    lanes = np.empty_like(lengths)
    totals = [(0, lane) for lane in range(num_lanes)]
    for number, length in enumerate(lengths.tolist()):
        total, lane = totals[0]
        heapq.heapreplace(totals, (total + length, lane))
        lanes[number] = lane
    return lanes


def describe_order(names: list[str], lengths: Indices, layout: StreamLayout) -> dict[str, Any]:
    """Return the values, to be part of a saved position, that distinguish this order from others."""
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=8)
    for name in names:
        digest.update(f"{len(name)} {name}".encode())
    return {"shards": digest.hexdigest(), **asdict(layout)}


# Interleave sequences in turns, by arithmetic.
#
# Three sequences, of 5, 2 and 3 positions, in turns of 2:
#
# position    0 1   2 3   4 5   6 7   8   9        the last turn of a sequence may be short,
# sequence    0 0   1 1   2 2   0 0   2   0        and a finished sequence is skipped
# number      0 1   0 1   0 1   2 3   2   4


@dataclass(frozen=True)
class _Rounds:
    """`_Rounds` describes rounds of equal size; the first has number `round` and begins at position `first`.

    In each round, sequence `which[i]` has `ends[i] - ends[i-1]` positions.
    """

    first: int
    round: int
    which: Indices
    ends: Indices


class RoundRobin:
    """`RoundRobin` interleaves sequences of `lengths`, `turn` positions of each at a time.

    Memory: one number per sequence if all lengths are equal, up to one per pair of sequences if all differ.
    """

    def __init__(self, lengths: Sequence[int], turn: int) -> None:
        self._turn = np.uint64(turn)
        self._rounds: list[_Rounds] = []
        left = np.asarray(lengths, dtype=np.int64)
        position = number = 0
        while left.any():
            which = np.flatnonzero(left)
            sizes = np.minimum(left[which], turn)
            is_short = bool((sizes < turn).any())
            count = 1 if is_short else int(left[which].min()) // turn
            ends = np.cumsum(sizes).astype(np.uint64)
            self._rounds.append(_Rounds(position, number, which.astype(np.uint64), ends))
            position += count * int(ends[-1])
            number += count
            left[which] -= count * sizes
        self.length = position
        self._firsts = np.array([one.first for one in self._rounds], dtype=np.uint64)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the sequence of each position, and the position's number in that sequence.

        Shape: `positions` and both results (n).
        """
        which, numbers = np.empty_like(positions), np.empty_like(positions)
        kinds = np.searchsorted(self._firsts, positions, side="right") - 1
        for kind in np.unique(kinds):
            rounds, chosen = self._rounds[kind], kinds == kind
            passed = positions[chosen] - np.uint64(rounds.first)
            number = passed // rounds.ends[-1]
            rest = passed - number * rounds.ends[-1]
            slot = np.searchsorted(rounds.ends, rest, side="right")
            begins = np.concatenate([np.zeros(1, dtype=np.uint64), rounds.ends[:-1]])
            which[chosen] = rounds.which[slot]
            numbers[chosen] = (number + np.uint64(rounds.round)) * self._turn + rest - begins[slot]
        return which, numbers
