"""Deal positions to sequences by turns, as arithmetic.

three sequences of 5, 2 and 3, in turns of 2

position    0 1   2 3   4 5   6 7   8   9        the last turn of a sequence may be a short one,
sequence    0 0   1 1   2 2   0 0   2   0        and who has nothing left is passed over
number      0 1   0 1   0 1   2 3   2   4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.data.permutation import Indices


@dataclass(frozen=True)
class _Rounds:
    """`_Rounds` are rounds from number `round` on, which begin at position `first`.

    Sequence `which[i]` gives `ends[i] - ends[i-1]` positions of each round.
    """

    first: int
    round: int
    which: Indices
    ends: Indices


class Turns:
    """`Turns` is the order in which sequences of `lengths` are gone through, `turn` positions of each at a time.

    Cost: as many numbers as there are sequences, squared where all have other lengths.
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
        """Return the sequence to which each position belongs, and its number in that sequence.

        Shape: (n), and so are both results.
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
