"""Describe the ranks' network: which ranks share a host (`Topology`), and the latency and bandwidth of a `Link`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """A `Topology` assigns each rank of 0..P-1 to exactly one host; hosts may differ in size."""

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = Counter(rank for host in self.hosts for rank in host)
        problems = []
        if not self.hosts or not all(self.hosts):
            problems.append("every host needs at least one rank")
        if sorted(count) != list(range(len(count))):
            problems.append(f"ranks must be 0..{len(count) - 1} without a gap")
        if twice := sorted(rank for rank, times in count.items() if times > 1):
            problems.append(f"ranks {twice[:8]} are on more than one host")
        if problems:
            shown = str(self.hosts) if len(self.hosts) <= 8 else f"{len(self.hosts)} hosts"
            raise ValueError(f"topology {shown}: {'; '.join(problems)}")

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> Topology:
        """Return a topology with the given number of ranks on each host, numbered host by host as launchers do."""
        hosts, first = [], 0
        for size in sizes:
            hosts.append(tuple(range(first, first + size)))
            first += size
        return cls(tuple(hosts))

    @classmethod
    def one_host(cls, world_size: int) -> Topology:
        """Return a topology of all ranks on one host."""
        return cls.of_sizes([world_size])

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """Return a topology with one rank per host."""
        return cls.of_sizes([1] * world_size)

    @classmethod
    def filled(cls, world_size: int, ranks_per_host: int) -> Topology:
        """Return a topology of as many full hosts as possible, and one smaller host for the remaining ranks."""
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        full, rest = divmod(world_size, ranks_per_host)
        return cls.of_sizes([ranks_per_host] * full + ([rest] if rest else []))

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """Return the index of each rank's host."""
        host_of = [0] * self.world_size
        for index, host in enumerate(self.hosts):
            for rank in host:
                host_of[rank] = index
        return tuple(host_of)

    @cached_property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(len(host) for host in self.hosts)


@dataclass(frozen=True)
class Link:
    """A `Link` is full duplex; a message of n bytes takes latency_s + n / bytes_per_s in either direction.

    Source: Hockney (1994), The communication challenge for MPP: Intel Paragon and Meiko CS-2.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"latency must be zero or more seconds, got {self.latency_s}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bandwidth must be more than 0 bytes/s, got {self.bytes_per_s}")
