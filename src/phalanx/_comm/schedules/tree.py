"""The binomial tree reduces towards the root and broadcasts back: whole buffers, in few steps.

Ranks are counted from the root: v = (rank - root) mod P. In step k of the reduction, every v that is an odd multiple of
2^k sends all its data to v - 2^k and is done. The broadcast uses the same edges in reverse.

    P = 6   step 0    1→0   3→2   5→4        broadcast: step 0   0→4
            step 1    2→0                               step 1   0→2
            step 2    4→0                               step 2   0→1   2→3   4→5

Steps: ⌈log2 P⌉ for each phase. Bytes at the root: S⌈log2 P⌉ for each phase (a buffer of S bytes). Best for small
buffers.
Order: a balanced tree over the ranks counted from the root: ((x0 + x1) + (x2 + x3)) + ((x4 + x5)).

Source: Thakur, Rabenseifner and Gropp (2005), Optimization of collective communication operations in MPICH.
"""

from __future__ import annotations

from phalanx._comm.schedules.schedule import Kind, Schedule, SchedulePhase, Transfer, require_world_size

ORDER = "a balanced binary tree over the ranks, counted from the root"


def _edges(name: str, size: int, root: int, kind: Kind) -> SchedulePhase:
    levels = (size - 1).bit_length()

    def distance(step: int) -> int:
        return 1 << (step if kind == "reduce" else levels - 1 - step)

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        v, d = (rank - root) % size, distance(step)
        if kind == "reduce" and v % (2 * d) == d:
            return (Transfer(rank, (rank - d) % size, 0, 1, kind),)
        if kind == "copy" and v % (2 * d) == 0 and v + d < size:
            return (Transfer(rank, (rank + d) % size, 0, 1, kind),)
        return ()

    def sources(step: int, rank: int) -> tuple[int, ...]:
        v, d = (rank - root) % size, distance(step)
        if kind == "reduce" and v % (2 * d) == 0 and v + d < size:
            return ((rank + d) % size,)
        if kind == "copy" and v % (2 * d) == d:
            return ((rank - d) % size,)
        return ()

    def senders(step: int) -> list[int]:
        d = distance(step)
        return [(v + root) % size for v in range(d if kind == "reduce" else 0, size, 2 * d)]

    return SchedulePhase(name, levels, sends, sources, senders)


def all_reduce(world_size: int) -> Schedule:
    """Return a reduction to rank 0 and a broadcast from it: 2⌈log2 P⌉ steps, S⌈log2 P⌉ bytes in and out of rank 0."""
    require_world_size(world_size)
    phases = (_edges("reduce", world_size, 0, "reduce"), _edges("broadcast", world_size, 0, "copy"))
    return Schedule("tree", "all_reduce", world_size, 1, phases, ORDER)


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Return a reduction to `root`: ⌈log2 P⌉ steps, S⌈log2 P⌉ bytes into the root."""
    require_world_size(world_size)
    return Schedule("tree", "reduce", world_size, 1, (_edges("reduce", world_size, root, "reduce"),), ORDER, root)


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Return a broadcast from `root`: ⌈log2 P⌉ steps, S⌈log2 P⌉ bytes out of the root."""
    require_world_size(world_size)
    phases = (_edges("broadcast", world_size, root, "copy"),)
    return Schedule("tree", "broadcast", world_size, 1, phases, "nothing is combined", root)
