"""In a ring every rank sends only to the next rank, one chunk at a time.

P ranks, P chunks. Scatter-reduce, step s: rank r sends chunk r-1-s, combined with the data that it has received for
that chunk, to rank r+1. After P-1 steps rank r holds the reduction of chunk r. All-gather, step s: rank r forwards
chunk r-s.

    P = 3   before      step 0           step 1                step 0, 1 of all-gather
    rank 0  a0 b0 c0    sends c0         sends b0+b2           Σa Σb Σc
    rank 1  a1 b1 c1    sends a1         sends c0+c1           Σa Σb Σc
    rank 2  a2 b2 c2    sends b2         sends a1+a2           Σa Σb Σc

Steps: P-1 for each phase. Bytes sent per rank: S(P-1)/P for each phase (a buffer of S bytes), the least that an
all_reduce can send.
Order: chunk c is combined along the ring starting at rank c+1: ((x[c+1] + x[c+2]) + …) + x[c].

Source: Patarasuk and Yuan (2009), Bandwidth optimal all-reduce algorithms for clusters of workstations.
"""

from __future__ import annotations

from phalanx._comm.schedules.schedule import Kind, Schedule, SchedulePhase, Transfer, require_world_size

ORDER = "chunk number i along the ring from rank i+1 to rank i, each rank adding its own to what arrives"


def _around(name: str, size: int, offset: int, kind: Kind) -> SchedulePhase:
    """Return a phase in which, in step s, rank r sends chunk r + offset - s to rank r + 1."""

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        chunk = (rank + offset - step) % size
        return (Transfer(rank, (rank + 1) % size, chunk, chunk + 1, kind),)

    return SchedulePhase(
        name=name,
        num_steps=size - 1,
        sends=sends,
        sources=lambda step, rank: ((rank - 1) % size,),
        senders=lambda step: range(size),
        alike=True,
    )


def all_reduce(world_size: int) -> Schedule:
    """Return a scatter-reduce followed by an all-gather: 2(P-1) steps, 2S(P-1)/P bytes sent per rank."""
    require_world_size(world_size)
    phases = (_around("scatter-reduce", world_size, -1, "reduce"), _around("all-gather", world_size, 0, "copy"))
    return Schedule("ring", "all_reduce", world_size, world_size, phases, ORDER)


def reduce_scatter(world_size: int) -> Schedule:
    """Return the first half of all_reduce: P-1 steps, S(P-1)/P bytes sent per rank."""
    require_world_size(world_size)
    phases = (_around("scatter-reduce", world_size, -1, "reduce"),)
    return Schedule("ring", "reduce_scatter", world_size, world_size, phases, ORDER)


def all_gather(world_size: int) -> Schedule:
    """Return the second half of all_reduce: P-1 steps, S(P-1)/P bytes sent per rank (S bytes are gathered in total)."""
    require_world_size(world_size)
    phases = (_around("all-gather", world_size, 0, "copy"),)
    return Schedule("ring", "all_gather", world_size, world_size, phases, "nothing is combined")
