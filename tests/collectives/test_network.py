"""Which ranks share a host, and what a link may be."""

from __future__ import annotations

import pytest

from phalanx.collectives import Link, Topology


def test_ranks_are_numbered_host_after_host() -> None:
    topology = Topology.of_sizes([2, 3])
    assert topology.hosts == ((0, 1), (2, 3, 4))
    assert topology.host_of == (0, 0, 1, 1, 1)
    assert topology.world_size == 5


def test_hosts_are_filled_and_the_last_takes_the_rest() -> None:
    assert [len(host) for host in Topology.filled(10, 4).hosts] == [4, 4, 2]
    assert Topology.filled(3, 1) == Topology.flat(3)
    assert Topology.filled(3, 5) == Topology.one_host(3)


def test_all_problems_of_a_topology_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"every host needs.*ranks must be 0\.\.1 without.*ranks \[0\] are on more"):
        Topology(((0, 2), (0,), ()))


def test_no_hosts_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="every host needs at least one rank"):
        Topology.of_sizes([])


def test_zero_ranks_per_host_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_host must be at least 1, got 0"):
        Topology.filled(4, 0)


@pytest.mark.parametrize("latency_s", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_is_no_span_is_refused(latency_s: float) -> None:
    with pytest.raises(ValueError, match="latency must be zero or more seconds"):
        Link(latency_s, 1e9)


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, float("nan")])
def test_a_bandwidth_that_carries_nothing_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth must be more than 0 bytes/s"):
        Link(0.0, bytes_per_s)
