"""Simulate a schedule rank by rank: each has its own clock, and goes on as soon as those it meets are ready.

A transfer starts when both of its ranks have finished their previous step, and takes what `cost.durations` says; a rank
has finished a step when all of its transfers in it have. (A one-sided step has a barrier in each host at both ends.)

Given that model, the clock of every rank is exact, for any schedule and any mix of hosts. A phase whose steps are alike
is played only until one step moves all clocks by the same amount; every later step then does the same, because
durations do not change and a transfer's start is a maximum of clocks. So 131,070 steps of a ring of 65,536 ranks are
exact after a few of them. These are approximated: chunks are S/C bytes, without rounding to elements; ports share
bandwidth among all transfers of a step as if these overlapped fully; and if a phase has not settled after `most_played`
transfers, each of its other steps is taken to move all clocks by the largest advance of the last one played, and
`exact` is False.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.collectives.cost import durations, require_fit
from phalanx.collectives.network import Links, Topology
from phalanx.collectives.schedule import Phase, Schedule

MOST_RANKS = 65_536

# A step has settled when the clocks' advances agree to rounding: sums of some thousand doubles.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Simulation:
    """A simulation says when the last and the first rank finished, which was last, and how much was played one by
    one.
    """

    seconds: float
    first_s: float
    slowest_rank: int
    steps: int
    transfers: int
    played: int
    exact: bool


def simulate(
    schedule: Schedule, nbytes: float, topology: Topology, links: Links, *, most_played: int = 20_000_000
) -> Simulation:
    """Play `schedule` for buffers of `nbytes` and up to 65,536 ranks; all ranks start at 0 s.

    Raises:
        ValueError: more ranks than that, or a topology with another number of ranks.
    """
    require_fit(schedule, nbytes, topology)
    if schedule.world_size > MOST_RANKS:
        raise ValueError(f"can simulate at most {MOST_RANKS} ranks, got {schedule.world_size}")
    bytes_per_chunk = nbytes / schedule.num_chunks
    clocks = [0.0] * schedule.world_size
    transfers, played, exact = 0, 0, True
    for phase in schedule.phases:
        pairs: list[tuple[int, int, float]] = []
        for step in range(phase.num_steps):
            if step == 0 or not phase.alike:
                pairs = _durations(phase, step, bytes_per_chunk, topology, links)
            left = phase.num_steps - step - 1
            before = list(clocks) if phase.alike and left else None
            _advance(phase, topology, clocks, pairs)
            transfers += len(pairs)
            played += len(pairs)
            if before is not None:
                advance = [now - then for now, then in zip(clocks, before, strict=True)]
                longest = max(advance)
                settled = longest - min(advance) <= _ROUNDING * longest
                if settled or played > most_played:
                    exact &= settled
                    clocks = [clock + left * longest for clock in clocks]
                    transfers += left * len(pairs)
                    break
    last = max(clocks)
    return Simulation(last, min(clocks), clocks.index(last), schedule.num_steps, transfers, played, exact)


def _durations(
    phase: Phase, step: int, bytes_per_chunk: float, topology: Topology, links: Links
) -> list[tuple[int, int, float]]:
    transfers = list(phase.transfers(step))
    seconds = durations(phase, transfers, bytes_per_chunk, topology, links)
    return [(t.src, t.dst, s) for t, s in zip(transfers, seconds, strict=True)]


def _advance(phase: Phase, topology: Topology, clocks: list[float], pairs: list[tuple[int, int, float]]) -> None:
    if phase.one_sided:
        longest = [0.0] * len(topology.hosts)
        for _, dst, seconds in pairs:
            host = topology.host_of[dst]
            longest[host] = max(longest[host], seconds)
        for ranks, seconds in zip(topology.hosts, longest, strict=True):
            end = max(clocks[rank] for rank in ranks) + seconds
            for rank in ranks:
                clocks[rank] = end
        return
    # All starts are read before any clock moves: a step's transfers do not wait for each other.
    ends = [max(clocks[src], clocks[dst]) + seconds for src, dst, seconds in pairs]
    for (src, dst, _), end in zip(pairs, ends, strict=True):
        clocks[src] = max(clocks[src], end)
        clocks[dst] = max(clocks[dst], end)
