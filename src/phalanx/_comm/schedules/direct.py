"""In shared memory, every rank reads its input directly from the other ranks' buffers.

The ranks of one host see each other's buffers, so no rank sends: rank r combines chunk r from all ranks' memory, all
wait, then all copy the finished chunks. This schedule describes, for `phalanx explain`, what the C core does.

Steps: 2, each with a barrier. Bytes read per rank: S(P-1)/P in each step (a buffer of S bytes).
Order: in rank order, as the core adds: ((x[0] + x[1]) + …) + x[P-1].
"""

from __future__ import annotations

from phalanx._comm.schedules.schedule import Kind, Schedule, SchedulePhase, Transfer, require_world_size

ORDER = "by rank, from 0 to the last, the same for each chunk"


def _exchange_all(name: str, size: int, kind: Kind) -> SchedulePhase:
    """Return a step in which each rank reads a chunk from every other rank: its own (reduce) or the other's (copy)."""

    def sends(step: int, rank: int) -> list[Transfer]:
        transfers = []
        for distance in range(1, size):
            dst = (rank + distance) % size
            chunk = dst if kind == "reduce" else rank
            transfers.append(Transfer(rank, dst, chunk, chunk + 1, kind))
        return transfers

    return SchedulePhase(
        name=name,
        num_steps=1 if size > 1 else 0,
        sends=sends,
        sources=lambda step, rank: [src for src in range(size) if src != rank],
        senders=lambda step: range(size),
        by_rank=True,
    )


def all_reduce(world_size: int) -> Schedule:
    """Return a schedule in which ranks reduce their own chunk, then copy the others: 2 steps, 2S(P-1)/P bytes read."""
    require_world_size(world_size)
    phases = (
        _exchange_all("reduce own chunk", world_size, "reduce"),
        _exchange_all("copy the others", world_size, "copy"),
    )
    return Schedule("direct", "all_reduce", world_size, world_size, phases, ORDER)


def reduce_scatter(world_size: int) -> Schedule:
    """Return a schedule in which each rank reduces its chunk: 1 step, S(P-1)/P bytes read per rank."""
    require_world_size(world_size)
    phases = (_exchange_all("reduce own chunk", world_size, "reduce"),)
    return Schedule("direct", "reduce_scatter", world_size, world_size, phases, ORDER)


def all_gather(world_size: int) -> Schedule:
    """Return a schedule that copies the others' chunks: 1 step, S(P-1)/P bytes read per rank."""
    require_world_size(world_size)
    phases = (_exchange_all("copy the others", world_size, "copy"),)
    return Schedule("direct", "all_gather", world_size, world_size, phases, "nothing is combined")


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Return a schedule in which all copy from `root`: 1 step, S bytes read per rank."""
    require_world_size(world_size)
    phase = SchedulePhase(
        name="copy from the root",
        num_steps=1 if world_size > 1 else 0,
        sends=lambda step, rank: [Transfer(root, d, 0, 1, "copy") for d in range(world_size) if rank == root != d],
        sources=lambda step, rank: () if rank == root else (root,),
        senders=lambda step: (root,),
    )
    return Schedule("direct", "broadcast", world_size, 1, (phase,), "nothing is combined", root)
