"""Two levels: reduce inside each host, combine across hosts slice by slice, gather inside each host.

The buffer is cut into L slices, L the most ranks on any host. A ring inside each host leaves every local rank with its
slices (host of R ranks: L/R each, rounded up or down). Each slice is then all-reduced across the H hosts by the ranks
that hold it, by any flat algorithm; all slices at once, so that every rank drives a part of its host's link. A second
ring inside each host hands the finished slices round.

    hosts (0 1 2) (3 4 5)      inside: 0 1 2 own slices x y z, 3 4 5 likewise
                               across: 0 ↔ 3 on x, 1 ↔ 4 on y, 2 ↔ 5 on z
                               inside: x y z handed round
    hosts (0 1 2) (3)          across: 0 ↔ 3 on x, 1 ↔ 3 on y, 2 ↔ 3 on z

Steps: 2(R-1) inside and 2(H-1) across with a ring. Bytes that leave a host: 2S(H-1)/H (S bytes), however many ranks it
has. Order: each host's ranks along its ring first, then the hosts in the order of the algorithm between them.

Source: the scheme is as old as SMP clusters; see Thakur, Rabenseifner and Gropp (2005), section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.collectives.network import Topology
from phalanx.collectives.schedule import Kind, Phase, Schedule, Transfer


@dataclass(frozen=True)
class _Slices:
    """Which local rank of each host drives which slices, and so which chunks; `width` chunks to a slice."""

    topology: Topology
    width: int

    @cached_property
    def count(self) -> int:
        return max(len(host) for host in self.topology.hosts)

    def driver(self, host: int, piece: int) -> int:
        """The rank of `host` that drives slice `piece`."""
        ranks = self.topology.hosts[host]
        return ranks[piece * len(ranks) // self.count]

    def driven(self, host: int, local_rank: int) -> range:
        """The slices that a host's `local_rank` drives; never empty, because no host has more ranks than slices."""
        size = len(self.topology.hosts[host])
        return range(-(-local_rank * self.count // size), -(-(local_rank + 1) * self.count // size))


def _inside(name: str, slices: _Slices, offset: int, kind: Kind) -> Phase:
    """A ring in each host at once, over the blocks of slices that its ranks drive; small hosts finish early."""
    topology = slices.topology
    local_rank = _local_ranks(topology)

    def sends(step: int, rank: int) -> tuple[Transfer, ...]:
        index, local = topology.host_of[rank], local_rank[rank]
        host = topology.hosts[index]
        if step >= len(host) - 1:
            return ()
        block = slices.driven(index, (local + offset - step) % len(host))
        dst = host[(local + 1) % len(host)]
        return (Transfer(rank, dst, block.start * slices.width, block.stop * slices.width, kind),)

    def sources(step: int, rank: int) -> tuple[int, ...]:
        host = topology.hosts[topology.host_of[rank]]
        return (host[(local_rank[rank] - 1) % len(host)],) if step < len(host) - 1 else ()

    return Phase(
        name=name,
        num_steps=slices.count - 1,
        sends=sends,
        sources=sources,
        senders=lambda step: range(topology.world_size),
        alike=topology.ranks_per_host is not None,
    )


def _across(phase: Phase, slices: _Slices) -> Phase:
    """`phase`, written for hosts, carried out for every slice by the ranks that drive it."""
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
    return Phase(
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
    """All-reduce for the ranks of `topology`; `across` is an all_reduce whose ranks are the hosts."""
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
            _inside("inside hosts: scatter-reduce", slices, -1, "reduce"),
            *(_across(phase, slices) for phase in across.phases),
            _inside("inside hosts: all-gather", slices, 0, "copy"),
        ),
        order=f"each host's ranks along its ring; then, with hosts for ranks, {across.order}",
    )
