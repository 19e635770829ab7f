"""A two-level all-reduce reduces in each host's memory, all-reduces slices across hosts, and gathers in memory.

The buffer is cut into L slices, where L is the largest number of ranks on any host. Inside a host of R ranks, each rank
combines its L/R slices (rounded up or down) directly from the others' memory. The ranks that hold a slice then
all-reduce it across the H hosts by any flat algorithm, all slices at once, so that every rank drives a part of its
host's link. Finally the ranks of a host copy the finished slices from each other.

    hosts (0 1 2) (3 4 5)      inside: 0 1 2 combine slices x y z, 3 4 5 likewise
                               across: 0 ↔ 3 on x, 1 ↔ 4 on y, 2 ↔ 5 on z
                               inside: all copy x y z
    hosts (0 1 2) (3)          across: 0 ↔ 3 on x, 1 ↔ 3 on y, 2 ↔ 3 on z

Steps: 2 inside, and 2(H-1) across with a ring. For a buffer of S bytes, 2S(H-1)/H bytes leave each host, however many
ranks it has.
Order: the ranks of each host in rank order, then the hosts in the order of the algorithm between them.

Source: Cho, Finkler, Kung and Hunter (2019), BlueConnect: decomposing all-reduce for deep learning on heterogeneous
network hierarchy; here with shared memory for the innermost level and hosts of unequal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx._comm.schedules.network import Topology
from phalanx._comm.schedules.schedule import Kind, Schedule, SchedulePhase, Transfer


@dataclass(frozen=True)
class _Slices:
    """`_Slices` assigns slices, and so chunks, to the local ranks of each host; a slice has `width` chunks."""

    topology: Topology
    width: int

    @cached_property
    def count(self) -> int:
        return max(len(host) for host in self.topology.hosts)

    def driver(self, host: int, piece: int) -> int:
        ranks = self.topology.hosts[host]
        return ranks[piece * len(ranks) // self.count]

    def driven(self, host: int, local_rank: int) -> range:
        """Return the slices that a host's `local_rank` drives; never empty, as no host has more ranks than slices."""
        size = len(self.topology.hosts[host])
        return range(-(-local_rank * self.count // size), -(-(local_rank + 1) * self.count // size))


def _inside(name: str, slices: _Slices, kind: Kind) -> SchedulePhase:
    """Return a step inside all hosts at once: each rank reads from the others' memory the slices that it drives itself
    (reduce), or the slices that the others drive (copy).
    """
    topology = slices.topology
    local_rank = _local_ranks(topology)

    def others(rank: int) -> list[int]:
        host, local = topology.hosts[topology.host_of[rank]], local_rank[rank]
        return [*host[:local], *host[local + 1 :]]

    def sends(step: int, rank: int) -> list[Transfer]:
        transfers = []
        for dst in others(rank):
            block = slices.driven(topology.host_of[rank], local_rank[dst if kind == "reduce" else rank])
            transfers.append(Transfer(rank, dst, block.start * slices.width, block.stop * slices.width, kind))
        return transfers

    return SchedulePhase(
        name=name,
        num_steps=1 if slices.count > 1 else 0,
        sends=sends,
        sources=lambda step, rank: others(rank),
        senders=lambda step: range(topology.world_size),
        by_rank=True,
    )


def _across(phase: SchedulePhase, slices: _Slices) -> SchedulePhase:
    """Apply `phase`, whose ranks are hosts, to every slice, on the ranks that drive the slice."""
    topology = slices.topology
    local_rank = _local_ranks(topology)

    def sends(step: int, rank: int) -> list[Transfer]:
        host = topology.host_of[rank]
        between_hosts = phase.sends(step, host)
        return [
            Transfer(rank, slices.driver(t.dst, piece), first + t.start, first + t.stop, t.kind)
            for piece in slices.driven(host, local_rank[rank])
            for first in (piece * slices.width,)
            for t in between_hosts
        ]

    def sources(step: int, rank: int) -> list[int]:
        host = topology.host_of[rank]
        mine = slices.driven(host, local_rank[rank])
        drivers = (slices.driver(src, piece) for src in phase.sources(step, host) for piece in mine)
        return list(dict.fromkeys(drivers))

    def senders(step: int) -> Sequence[int]:
        return [rank for host in phase.senders(step) for rank in topology.hosts[host]]

    most = max(len(slices.driven(host, 0)) for host in range(len(topology.hosts)))
    return SchedulePhase(
        name=f"between hosts: {phase.name}",
        num_steps=phase.num_steps,
        sends=sends,
        sources=sources,
        senders=senders,
        alike=phase.alike,
        per_link=most * phase.per_link,
    )


def _local_ranks(topology: Topology) -> list[int]:
    local_rank = [0] * topology.world_size
    for host in topology.hosts:
        for local, rank in enumerate(host):
            local_rank[rank] = local
    return local_rank


def all_reduce(topology: Topology, across: Schedule) -> Schedule:
    """Return an all_reduce for the ranks of `topology`; `across` is an all_reduce whose ranks are the hosts."""
    if across.operation != "all_reduce" or across.world_size != len(topology.hosts):
        raise ValueError(
            f"the schedule between hosts must be an all_reduce of {len(topology.hosts)} ranks, one for each host, "
            f"got {across.operation} of {across.world_size}"
        )
    slices = _Slices(topology, across.num_chunks)
    return Schedule(
        algorithm="hierarchical",
        operation="all_reduce",
        world_size=topology.world_size,
        num_chunks=slices.count * slices.width,
        phases=(
            _inside("inside hosts: scatter-reduce", slices, "reduce"),
            *(_across(phase, slices) for phase in across.phases),
            _inside("inside hosts: all-gather", slices, "copy"),
        ),
        order=f"each host's ranks in rank order; then, across hosts: {across.order}",
    )
