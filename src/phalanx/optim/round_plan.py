"""Plan which ranks take a mean of which part of the model, and after which step. The plan is pure.

LocalSGD, DiLoCo, EASGD   every sync_every steps    all ranks            all of the model
GossipSGD                 every sync_every steps    pairs, others each   all of the model
                                                    round
StreamingDiLoCo           every sync_every /        all ranks            one fragment after the other; taken over
                          num_fragments steps                            `delay` steps later

Partners by hypercube, of 4 ranks (after log2(P) rounds without steps between them all have the mean of all):

    round 0   0-1  2-3
    round 1   0-2  1-3
    round 2   0-1  2-3

Random partners, of 5 ranks (one is left over), are a matching drawn from the seed and the round's number, the same on
each rank:

    round 0   1-4  0-2  3
    round 1   0-3  1-2  4

Source: Boyd et al. (2006), Randomized gossip algorithms; Assran et al. (2019), Stochastic Gradient Push.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Topology = Literal["hypercube", "random"]


@dataclass(frozen=True)
class Round:
    """In a round the ranks of a group take the mean of a fragment of their models.

    `begins` and `ends` are steps of each rank, counted from 1: after the first it gives what it has, after the second
    it takes over the result.
    """

    number: int
    begins: int
    ends: int
    fragment: int
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with which `rank` takes the mean, itself included."""
        return next(group for group in self.groups if rank in group)


@dataclass(frozen=True)
class RoundPlan:
    """A round plan has all rounds of a training of `world_size` ranks. `topology` is that of pairs; None is all
    together.
    """

    world_size: int
    sync_every: int
    num_fragments: int = 1
    delay: int = 0
    topology: Topology | None = None
    seed: int = 0

    @property
    def steps_between(self) -> int:
        """Return the steps from the beginning of a round to that of the next one."""
        return self.sync_every // self.num_fragments

    def round(self, number: int) -> Round:
        """Return round `number`, counted from 0."""
        begins = (number + 1) * self.steps_between
        return Round(number, begins, begins + self.delay, number % self.num_fragments, self._groups(number))

    def _groups(self, number: int) -> tuple[tuple[int, ...], ...]:
        if self.topology is None:
            return (tuple(range(self.world_size)),)
        if self.topology == "hypercube":
            bit = 1 << number % max(1, (self.world_size - 1).bit_length())
            pairs = [(rank, rank | bit) for rank in range(self.world_size) if not rank & bit]
            return tuple(pair if pair[1] < self.world_size else pair[:1] for pair in pairs)
        drawn = list(range(self.world_size))
        random.Random(f"{self.seed} {number}").shuffle(drawn)
        return tuple(tuple(sorted(drawn[first : first + 2])) for first in range(0, self.world_size, 2))

    def describe(self, num_rounds: int) -> str:
        """Return the first rounds as a table."""
        lines = ["round  behind step  taken over  fragment  ranks"]
        for number in range(num_rounds):
            one = self.round(number)
            ranks = "  ".join("-".join(map(str, group)) for group in one.groups)
            fragment = f"{one.fragment + 1} of {self.num_fragments}"
            lines.append(f"{number:5}  {one.begins:11}  {one.ends:10}  {fragment:>8}  {ranks}")
        return "\n".join(lines)


def decide_topology(world_size: int, topology: Topology | None) -> Topology:
    """Return the topology that is asked for; by default "hypercube" where it reaches all ranks alike, "random"
    elsewhere.

    Raises:
        ValueError: there is no such topology, or not for so many ranks.
    """
    is_power = world_size & (world_size - 1) == 0
    if topology is None:
        return "hypercube" if is_power else "random"
    if topology not in ("hypercube", "random"):
        raise ValueError(f"GossipSGD: topology must be 'hypercube', 'random' or None, got {topology!r}")
    if topology == "hypercube" and not is_power:
        raise ValueError(
            f"GossipSGD: topology 'hypercube' is for 2, 4, 8, ... ranks, and there are {world_size}: use 'random'"
        )
    return topology


def plan_fragments(sizes: Sequence[int], num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the parameters of each fragment: runs of neighbours, of nearly the same size, none empty.

    Raises:
        ValueError: there are fewer parameters.
    """
    if num_fragments > len(sizes):
        raise ValueError(f"StreamingDiLoCo: {len(sizes)} parameters cannot be cut into {num_fragments} fragments")
    ends = list(itertools.accumulate(sizes))
    fragments, start = [], 0
    for number in range(1, num_fragments + 1):
        stop = bisect.bisect_left(ends, ends[-1] * number / num_fragments) + 1
        stop = min(max(stop, start + 1), len(sizes) - (num_fragments - number))
        fragments.append(tuple(range(start, stop)))
        start = stop
    return tuple(fragments)
