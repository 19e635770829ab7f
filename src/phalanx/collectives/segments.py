"""Cut a long buffer into segments that follow each other through a schedule, so that all links have work at once.

Segment s starts in step s: while it takes the schedule's step k, segment s + 1 takes step k - 1.

    step   0   1   2   3   4   5
    s0     a   b   c   d                  a, b, c, d: the steps of the schedule
    s1         a   b   c   d
    s2             a   b   c   d

A tree's root then receives one segment, combines another and sends a third, where a whole buffer would do one thing
after the other. The backend cuts what travels between hosts in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.collectives.schedule import Phase, Schedule, Transfer


def in_segments(schedule: Schedule, count: int) -> Schedule:
    """Return `schedule` for a buffer that is cut into `count` segments, each into the schedule's chunks.

    Phases that read memory (`one_sided`) have no links to fill, and take all segments in each step.

    Steps: count - 1 more than the schedule, for each run of phases between which nobody reads memory. Bytes and order
    of combining: those of the schedule.

    Raises:
        ValueError: `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"a buffer has at least 1 segment, got {count}")
    phases: list[Phase] = []
    for one_sided, run in itertools.groupby(schedule.phases, key=lambda phase: phase.one_sided):
        if one_sided:
            phases += [_at_once(phase, count, schedule.num_chunks) for phase in run]
        else:
            phases += _one_by_one(tuple(run), count, schedule.num_chunks)
    return replace(schedule, num_chunks=schedule.num_chunks * count, phases=tuple(phases))


def _shifted(transfers: Sequence[Transfer], by: int) -> Iterator[Transfer]:
    return (t._replace(start=t.start + by, stop=t.stop + by) for t in transfers)


def _at_once(phase: Phase, count: int, chunks: int) -> Phase:
    def sends(step: int, rank: int) -> list[Transfer]:
        transfers = phase.sends(step, rank)
        return [t for segment in range(count) for t in _shifted(transfers, segment * chunks)]

    return replace(phase, sends=sends, per_link=phase.per_link * count)


def _one_by_one(phases: Sequence[Phase], count: int, chunks: int) -> Sequence[Phase]:
    steps = [(phase, within) for phase in phases for within in range(phase.num_steps)]
    if count == 1 or not steps:
        return phases

    def under_way(turn: int) -> Iterator[tuple[int, Phase, int]]:
        """Yield the segments that do a step in this turn, the oldest first, and which step."""
        for segment in range(max(0, turn - len(steps) + 1), min(count, turn + 1)):
            yield segment * chunks, *steps[turn - segment]

    def sends(turn: int, rank: int) -> list[Transfer]:
        return [t for first, phase, within in under_way(turn) for t in _shifted(phase.sends(within, rank), first)]

    def sources(turn: int, rank: int) -> list[int]:
        return list(dict.fromkeys(src for _, phase, within in under_way(turn) for src in phase.sources(within, rank)))

    def senders(turn: int) -> list[int]:
        return sorted({rank for _, phase, within in under_way(turn) for rank in phase.senders(within)})

    pipeline = Phase(
        name=f"{', then '.join(phase.name for phase in phases if phase.num_steps)}, {count} segments in turns",
        num_steps=len(steps) + count - 1,
        sends=sends,
        sources=sources,
        senders=senders,
        per_link=min(count, len(steps)) * max(phase.per_link for phase in phases),
    )
    return (pipeline,)
