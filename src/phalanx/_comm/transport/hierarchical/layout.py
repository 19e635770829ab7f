"""A `Layout` says which ranks are on which host, and which of them drive the rails between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx._comm.schedules import Topology


@dataclass(frozen=True)
class Layout:
    """A `Layout` is one rank's view of the hosts of its group.

    Rail i joins the i-th rank of every host; there are as many rails as the smallest host has ranks.

        host 0: ranks 0 1 2      rail 0: 0 3      rail 1: 1 4      rank 2 drives none
        host 1: ranks 3 4
    """

    topology: Topology
    rank: int

    @classmethod
    def of(cls, hosts: Sequence[str], rank: int) -> Layout:
        """Return the layout for the given host name of each rank. Hosts are numbered in order of their first rank."""
        by_host: dict[str, list[int]] = {}
        for r, host in enumerate(hosts):
            by_host.setdefault(host, []).append(r)
        return cls(Topology(tuple(tuple(ranks) for ranks in by_host.values())), rank)

    @cached_property
    def host(self) -> int:
        return self.topology.host_of[self.rank]

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the group's ranks on this host; a rank's index in the result is its local rank."""
        return self.topology.hosts[self.host]

    @cached_property
    def local_rank(self) -> int:
        """Return this rank's local rank."""
        return self.local_ranks.index(self.rank)

    @cached_property
    def num_hosts(self) -> int:
        return len(self.topology.hosts)

    @cached_property
    def has_one_rank_each(self) -> bool:
        """Return whether no two ranks share a host."""
        return self.num_hosts == self.topology.world_size

    @cached_property
    def num_rails(self) -> int:
        """Return the number of rails: as many slices are sent between hosts at the same time."""
        return min(len(ranks) for ranks in self.topology.hosts)

    @cached_property
    def rail(self) -> tuple[int, ...]:
        """Return the ranks of this rank's rail, by host; empty if this rank drives no rail."""
        if self.local_rank >= self.num_rails:
            return ()
        return tuple(ranks[self.local_rank] for ranks in self.topology.hosts)

    @cached_property
    def by_host(self) -> tuple[int, ...]:
        """Return all ranks, host by host."""
        return tuple(rank for ranks in self.topology.hosts for rank in ranks)
