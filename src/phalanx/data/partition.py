"""Compute, by pure arithmetic, which positions of an epoch a rank reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """`Partition` is the `count` positions `start, start + step, ...` that one rank reads in the order of one epoch.

    Rank r of P reads every P-th position, from the r-th position that no rank has consumed:

        position   0  1  2  3  4  5  6  7  8  9   length 10, two ranks, nothing consumed
        rank       0  1  0  1  0  1  0  1  0  1

        position   0  1  2  3  4  5  6  7  8  9   the same epoch, resumed by three ranks after 4 samples
        rank       -  -  -  -  0  1  2  0  1  2

    So the samples that the whole job has consumed are always a prefix of the order, which one number describes.
    Positions from `length` on are padding: they repeat the beginning of the order (position modulo `length`).
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
        """Return the distance between consecutive positions of this rank."""
        return self.world_size

    def consumed_after(self, num_read: int) -> int:
        """Return how many samples the whole job has consumed when every rank has read `num_read` of its partition.

        A rank at the end of its partition counts the whole epoch, even if other partitions are longer by one.
        """
        if num_read >= self.count:
            return self.length
        return min(self.length, self.consumed + num_read * self.world_size)


def plan_partition(
    length: int, world_size: int, rank: int, *, consumed: int = 0, padding: bool = True, drop_last: bool = False
) -> Partition:
    """Return the partition of `rank` in the rest of an epoch of `length` samples after `consumed` of them.

    With `drop_last`, every rank reads the same number, and the remainder is left out. Otherwise, with `padding`, every
    rank reads the same number, because the first samples are repeated. With neither, the first ranks may read one more.
    """
    left = length - consumed
    if drop_last:
        count = left // world_size
    elif padding:
        count = -(-left // world_size)
    else:
        count = max(0, -(-(left - rank) // world_size))
    return Partition(length, consumed, world_size, rank, count)
