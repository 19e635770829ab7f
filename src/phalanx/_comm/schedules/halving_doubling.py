"""Recursive halving and doubling sends as few bytes as the ring in as few steps as a tree, if P is a power of two.

Halving, distance d = Q/2, Q/4, … 1: every rank exchanges halves with the rank whose number differs in the bit d, and
combines the half with its own chunk. Doubling runs the same exchanges in reverse, with results instead of parts.

    Q = 4   rank 0           rank 1           rank 2           rank 3
    d = 2   sends cd to 2    sends cd to 3    sends ab to 0    sends ab to 1     then 0, 1 work on ab and 2, 3 on cd
    d = 1   sends b to 1     sends a to 0     sends d to 3     sends c to 2      then rank r has chunk r

If P is not a power of two, Q is the largest power of two below P, and the ranks are folded: of the first 2(P-Q) ranks
the odd ones send all their data to their even neighbour, stay idle, and receive the result at the end.

Steps: 2 log2 Q, plus 2 if folded. Bytes sent by the busiest rank: 2S(Q-1)/Q, plus S if folded (a buffer of S bytes).
Order: a balanced tree, the farthest ranks first (folded neighbours before them): (x0 + x2) + (x1 + x3).

Source: Rabenseifner (2004), Optimization of collective reduction operations; Thakur, Rabenseifner and Gropp (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx._comm.schedules.schedule import Kind, Schedule, SchedulePhase, Transfer, require_world_size

ORDER = "a balanced binary tree: folded neighbours first, then the farthest ranks, the nearest last"


@dataclass(frozen=True)
class Fold:
    """A `Fold` maps P ranks to Q actors, where Q is the largest power of two up to P; each actor has adjacent chunks.

    With `chunk_per_rank`, there is a chunk for each rank, and an actor has the chunks of the ranks that it acts for, as
    reduce_scatter and all_gather require; otherwise there is one chunk for each actor.
    """

    world_size: int
    chunk_per_rank: bool

    @property
    def actors(self) -> int:
        """Return Q, the number of actors."""
        return 1 << (self.world_size.bit_length() - 1)

    @property
    def folded(self) -> int:
        """Return the number of idle ranks."""
        return self.world_size - self.actors

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of the buffer."""
        return self.world_size if self.chunk_per_rank else self.actors

    def rank(self, actor: int) -> int:
        return 2 * actor if actor < self.folded else actor + self.folded

    def actor(self, rank: int) -> int | None:
        """Return the actor number of `rank`; None if the rank is idle."""
        if rank >= 2 * self.folded:
            return rank - self.folded
        return None if rank % 2 else rank // 2

    def first_chunk(self, actor: int) -> int:
        """Return the first chunk of `actor`; the last actor's chunks end at first_chunk(actors)."""
        return self.rank(actor) if self.chunk_per_rank else actor


def _exchange(name: str, fold: Fold, kind: Kind) -> SchedulePhase:
    levels = fold.actors.bit_length() - 1

    def distance(step: int) -> int:
        return 1 << (levels - 1 - step if kind == "reduce" else step)

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        actor = fold.actor(rank)
        if actor is None:
            return ()
        d = distance(step)
        partner = actor ^ d
        block = (partner if kind == "reduce" else actor) // d * d
        start, stop = fold.first_chunk(block), fold.first_chunk(block + d)
        return (Transfer(rank, fold.rank(partner), start, stop, kind),)

    def sources(step: int, rank: int) -> tuple[int, ...]:
        actor = fold.actor(rank)
        return () if actor is None else (fold.rank(actor ^ distance(step)),)

    return SchedulePhase(name, levels, sends, sources, lambda step: [fold.rank(actor) for actor in range(fold.actors)])


def neighbours(
    name: str, fold: Fold, kind: Kind, *, inward: bool, chunks: Callable[[int], tuple[int, int]]
) -> SchedulePhase:
    """Return the step between idle (odd) ranks and the ranks that act for them, or no step if no rank is folded.

    The idle ranks send if `inward`, and otherwise receive.
    """

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        if rank >= 2 * fold.folded or rank % 2 != inward:
            return ()
        return (Transfer(rank, rank ^ 1, *chunks(rank | 1), kind),)

    def sources(step: int, rank: int) -> tuple[int, ...]:
        return (rank ^ 1,) if rank < 2 * fold.folded and rank % 2 != inward else ()

    def senders(step: int) -> Sequence[int]:
        return range(int(inward), 2 * fold.folded, 2)

    return SchedulePhase(name, min(1, fold.folded), sends, sources, senders)


def all_reduce(world_size: int) -> Schedule:
    """Return a schedule that folds, halves, doubles, unfolds: 2 log2 Q steps, 2S(Q-1)/Q bytes; +2 and +S if folded."""
    require_world_size(world_size)
    fold = Fold(world_size, chunk_per_rank=False)
    phases = (
        neighbours("fold", fold, "reduce", inward=True, chunks=lambda odd: (0, fold.num_chunks)),
        _exchange("halving", fold, "reduce"),
        _exchange("doubling", fold, "copy"),
        neighbours("unfold", fold, "copy", inward=False, chunks=lambda odd: (0, fold.num_chunks)),
    )
    return Schedule("halving_doubling", "all_reduce", world_size, fold.num_chunks, phases, ORDER)


def reduce_scatter(world_size: int) -> Schedule:
    """Return a schedule that folds, halves, and sends folded ranks their chunk: log2 Q steps, plus 2 if folded."""
    require_world_size(world_size)
    fold = Fold(world_size, chunk_per_rank=True)
    phases = (
        neighbours("fold", fold, "reduce", inward=True, chunks=lambda odd: (0, world_size)),
        _exchange("halving", fold, "reduce"),
        neighbours("unfold", fold, "copy", inward=False, chunks=lambda odd: (odd, odd + 1)),
    )
    return Schedule("halving_doubling", "reduce_scatter", world_size, world_size, phases, ORDER)


def all_gather(world_size: int) -> Schedule:
    """Return a schedule that folds (collects idle ranks' chunks), doubles, unfolds: log2 Q steps, plus 2 if folded."""
    require_world_size(world_size)
    fold = Fold(world_size, chunk_per_rank=True)
    phases = (
        neighbours("fold", fold, "copy", inward=True, chunks=lambda odd: (odd, odd + 1)),
        _exchange("doubling", fold, "copy"),
        neighbours("unfold", fold, "copy", inward=False, chunks=lambda odd: (0, world_size)),
    )
    return Schedule("halving_doubling", "all_gather", world_size, world_size, phases, "nothing is combined")
