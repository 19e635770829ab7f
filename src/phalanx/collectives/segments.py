"""A long buffer in segments that follow each other through a schedule, so that all links have work at once.

Segment s starts in step s: while it takes the schedule's step k, segment s + 1 takes step k - 1.

    step   0   1   2   3   4   5
    s0     a   b   c   d                  a, b, c, d: the steps of the schedule
    s1         a   b   c   d
    s2             a   b   c   d

A tree's root then receives one segment, combines another and sends a third, where a whole buffer would do one thing
after the other. The backend cuts what travels between hosts in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.collectives.schedule import Phase, Schedule, Transfer


def in_segments(schedule: Schedule, count: int) -> Schedule:
    """`schedule` for a buffer cut into `count` segments, each into the schedule's chunks.

    Steps: those of the schedule + count - 1. Bytes: those of the schedule. Order of combining: that of the schedule.

    Raises:
        ValueError: `count` is less than 1, or the schedule reads memory (`one_sided`), which has no links to fill.
    """
    if count < 1:
        raise ValueError(f"a buffer has at least 1 segment, got {count}")
    if any(phase.one_sided for phase in schedule.phases):
        raise ValueError(f"{schedule.algorithm} reads memory; cut its part between hosts into segments")
    if count == 1 or not schedule.num_steps:
        return replace(schedule, num_chunks=schedule.num_chunks * count)
    steps = list(schedule.steps())
    chunks = schedule.num_chunks

    def under_way(turn: int) -> Iterator[tuple[int, Phase, int]]:
        """The segments that do a step in this turn, the oldest first, and which step."""
        for segment in range(max(0, turn - len(steps) + 1), min(count, turn + 1)):
            _, phase, within = steps[turn - segment]
            yield segment * chunks, phase, within

    def sends(turn: int, rank: int) -> list[Transfer]:
        return [
            t._replace(start=t.start + first, stop=t.stop + first)
            for first, phase, within in under_way(turn)
            for t in phase.sends(within, rank)
        ]

    def sources(turn: int, rank: int) -> list[int]:
        return list(dict.fromkeys(src for _, phase, within in under_way(turn) for src in phase.sources(within, rank)))

    def senders(turn: int) -> list[int]:
        return sorted({rank for _, phase, within in under_way(turn) for rank in phase.senders(within)})

    pipeline = Phase(
        name=f"{count} segments",
        num_steps=len(steps) + count - 1,
        sends=sends,
        sources=sources,
        senders=senders,
        per_link=min(count, len(steps)) * max(phase.per_link for phase in schedule.phases),
    )
    return replace(schedule, num_chunks=chunks * count, phases=(pipeline,))
