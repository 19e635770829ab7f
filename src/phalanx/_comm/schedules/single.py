"""With a single reducer, the baseline, all ranks send everything to one rank, which sends the result back.

A parameter server on one machine works like this. The time grows with the number of ranks, because all bytes pass
through one rank's link, one sender after the other. Every other algorithm here is compared with this one.

Steps: P-1 for each phase. Bytes at the reducer: S(P-1) for each phase (a buffer of S bytes).
Order: by rank, counted from the reducer: ((x0 + x1) + x2) + …
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._comm.schedules.schedule import Schedule, SchedulePhase, Transfer, require_world_size

ORDER = "by rank, counted from the root, one after the other"


def _gather(size: int, root: int) -> SchedulePhase:
    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        return (Transfer(rank, root, 0, 1, "reduce"),) if (rank - root) % size == step + 1 else ()

    def sources(step: int, rank: int) -> Sequence[int]:
        return ((root + step + 1) % size,) if rank == root else ()

    return SchedulePhase("gather and reduce", size - 1, sends, sources, lambda step: ((root + step + 1) % size,))


def _broadcast(size: int, root: int) -> SchedulePhase:
    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        return (Transfer(root, (root + step + 1) % size, 0, 1, "copy"),) if rank == root else ()

    def sources(step: int, rank: int) -> Sequence[int]:
        return (root,) if (rank - root) % size == step + 1 else ()

    return SchedulePhase("broadcast", size - 1, sends, sources, lambda step: (root,))


def all_reduce(world_size: int) -> Schedule:
    """Return a schedule that sends everything through rank 0: 2(P-1) steps, S(P-1) bytes in and out of rank 0."""
    require_world_size(world_size)
    phases = (_gather(world_size, 0), _broadcast(world_size, 0))
    return Schedule("single", "all_reduce", world_size, 1, phases, ORDER)


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Return a schedule that sends everything to `root`: P-1 steps, S(P-1) bytes into it."""
    require_world_size(world_size)
    return Schedule("single", "reduce", world_size, 1, (_gather(world_size, root),), ORDER, root)


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Return a schedule that sends everything from `root`: P-1 steps, S(P-1) bytes out of it."""
    require_world_size(world_size)
    return Schedule("single", "broadcast", world_size, 1, (_broadcast(world_size, root),), "nothing is combined", root)
