"""Recursive doubling exchanges whole buffers: it takes few steps, but sends many bytes if there are many ranks.

Distance d = 1, 2, 4, … Q/2: every rank exchanges its buffer with the rank whose number differs in the bit d, and both
combine the two buffers.

    Q = 4   rank 0           rank 1           rank 2           rank 3
    d = 1   swaps with 1     swaps with 0     swaps with 3     swaps with 2      then 0, 1 hold x0+x1 and 2, 3 x2+x3
    d = 2   swaps with 2     swaps with 3     swaps with 0     swaps with 1      then all hold everything

If P is not a power of two, the ranks are folded to Q, the largest power of two below P, as in `halving_doubling`.

Steps: log2 Q, plus 2 if folded. Bytes sent by the busiest rank: S·log2 Q, plus S if folded (a buffer of S bytes). Two
ranks send as many bytes as in a ring, in half the steps, and no send waits for a receive.
Order: a balanced tree, the nearest ranks first (folded neighbours before them): (x0 + x1) + (x2 + x3).

Source: Thakur, Rabenseifner and Gropp (2005), Optimization of collective communication operations in MPICH.
"""

from __future__ import annotations

from phalanx._comm.schedules.halving_doubling import Fold, neighbours
from phalanx._comm.schedules.schedule import Schedule, SchedulePhase, Transfer, require_world_size


def all_reduce(world_size: int) -> Schedule:
    """Return a schedule that folds, doubles, unfolds: log2 Q steps and S·log2 Q bytes, plus 2 and S if folded."""
    require_world_size(world_size)
    fold = Fold(world_size, chunk_per_rank=False)

    def partner(step: int, rank: int) -> int | None:
        actor = fold.actor(rank)
        return None if actor is None else fold.rank(actor ^ (1 << step))

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        other = partner(step, rank)
        return () if other is None else (Transfer(rank, other, 0, 1, "reduce"),)

    def sources(step: int, rank: int) -> tuple[int, ...]:
        other = partner(step, rank)
        return () if other is None else (other,)

    levels = fold.actors.bit_length() - 1
    phases = (
        neighbours("fold", fold, "reduce", inward=True, chunks=lambda odd: (0, 1)),
        SchedulePhase(
            "doubling", levels, sends, sources, lambda step: [fold.rank(actor) for actor in range(fold.actors)]
        ),
        neighbours("unfold", fold, "copy", inward=False, chunks=lambda odd: (0, 1)),
    )
    order = "a balanced binary tree: folded neighbours first, then the nearest ranks, the farthest last"
    return Schedule("doubling", "all_reduce", world_size, 1, phases, order)
