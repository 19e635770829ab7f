"""Plan which positions of an epoch one rank takes, as arithmetic: nothing here knows data, processes or time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """`Partition` has the `count` positions `start, start + step, ...` that one rank takes from the order of one epoch.

    Rank r of P takes every P-th position from the first one that nobody has consumed:

        position   0  1  2  3  4  5  6  7  8  9   length 10, two ranks, nothing consumed
        rank       0  1  0  1  0  1  0  1  0  1

        position   0  1  2  3  4  5  6  7  8  9   the same epoch, taken up by three ranks after 4 samples
        rank       -  -  -  -  0  1  2  0  1  2

    So what the whole job has consumed is always a prefix of the order, and one number says how much.
    Positions from `length` on are padding: they stand for the order's beginning again (position modulo `length`).
    """

    length: int
    consumed: int
    world_size: int
    rank: int
    count: int

    @property
    def start(self) -> int:
        return self.consumed + self.rank

    @property
    def step(self) -> int:
        """Return the distance from one position of this rank to its next."""
        return self.world_size

    def consumed_after(self, taken: int) -> int:
        """Return how many samples the whole job has consumed when every rank has taken `taken` of its partition.

        A rank whose partition is used up knows that the epoch is over, also when its partition was the shorter one.
        """
        if taken >= self.count:
            return self.length
        return min(self.length, self.consumed + taken * self.world_size)


def plan_partition(
    length: int, world_size: int, rank: int, *, consumed: int = 0, padding: bool = True, drop_last: bool = False
) -> Partition:
    """Return the partition of `rank` in the rest of an epoch over `length` samples of which `consumed` are done.

    With `drop_last` every rank takes the same number and the remainder is left out; otherwise with `padding` every
    rank takes the same number and the first samples are repeated; without, the first ranks take one more.
    """
    left = length - consumed
    if drop_last:
        count = left // world_size
    elif padding:
        count = -(-left // world_size)
    else:
        count = max(0, -(-(left - rank) // world_size))
    return Partition(length, consumed, world_size, rank, count)
