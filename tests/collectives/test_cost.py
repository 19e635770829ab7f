"""Prices: what the formulas say, what the schedules say, and what playing them out says."""

from __future__ import annotations

import pytest

from phalanx.collectives import ALGORITHMS, Link, Links, Topology, build
from phalanx.collectives.algorithms import fits
from phalanx.collectives.closed_form import closed_form, predict
from phalanx.collectives.cost import of_schedule
from phalanx.collectives.simulate import simulate

LINKS = Links(intra=Link(2e-6, 5e9), inter=Link(30e-6, 1.25e8), reduce_bytes_per_s=3e9)
MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 4, 64 * MIB])
@pytest.mark.parametrize("ranks_per_host", [1, 3, 4, 100])
def test_formula_schedule_and_simulation_agree(nbytes: int, ranks_per_host: int) -> None:
    compared = 0
    for world_size in [*range(1, 10), 12, 16, 17]:
        topology = Topology.filled(world_size, ranks_per_host)
        for algorithm in ALGORITHMS.values():
            if not fits(algorithm, topology):
                continue
            for operation in algorithm.operations:
                schedule = build(algorithm.name, operation, topology)
                formula = closed_form(algorithm.name, operation, nbytes, topology, LINKS)
                if formula is None:
                    continue
                priced = of_schedule(schedule, nbytes, topology, LINKS)
                played = simulate(schedule, nbytes, topology, LINKS)
                assert formula.steps == priced.steps == played.steps
                assert formula.busiest_bytes == pytest.approx(priced.busiest_bytes, rel=1e-9)
                assert formula.seconds == pytest.approx(priced.seconds, rel=1e-9)
                assert formula.seconds == pytest.approx(played.seconds, rel=1e-9)
                compared += 1
    assert compared >= 20


def test_the_ring_sends_the_fewest_bytes_that_an_all_reduce_can() -> None:
    cost = predict("ring", "all_reduce", 64 * MIB, Topology.flat(4), LINKS)
    assert cost.steps == 6
    assert cost.busiest_bytes == 96 * MIB


def test_a_single_reducer_handles_everybodys_bytes() -> None:
    assert predict("single", "all_reduce", MIB, Topology.flat(9), LINKS).busiest_bytes == 8 * MIB


def test_ranks_of_one_host_share_its_link_to_the_others() -> None:
    # Two ranks of host 0 each send everything to host 1 at the same time: the link carries both.
    schedule = build("halving_doubling", "all_reduce", Topology.of_sizes([2, 2]))
    shared = of_schedule(schedule, MIB, Topology.of_sizes([2, 2]), Links(Link(0, 1e18), Link(0, 1e6), 1e18))
    alone = of_schedule(schedule, MIB, Topology.flat(4), Links(Link(0, 1e18), Link(0, 1e6), 1e18))
    assert shared.seconds == pytest.approx(2 * 2 * (MIB / 2) / 1e6)  # 2 ranks x halving and doubling x half a buffer
    assert alone.seconds == pytest.approx(2 * (MIB / 2 + MIB / 4) / 1e6)


def test_the_hierarchy_crosses_a_hosts_edge_with_the_same_bytes_however_many_ranks_it_has() -> None:
    only_the_edge = Links(Link(0, 1e18), Link(0, 1e6), 1e18)
    for ranks in (1, 2, 5):
        cost = predict("hierarchical", "all_reduce", MIB, Topology.of_sizes([ranks] * 3), only_the_edge)
        assert cost.seconds == pytest.approx(2 * MIB * 2 / 3 / 1e6)


def test_one_rank_costs_nothing() -> None:
    for algorithm in ALGORITHMS:
        cost = predict(algorithm, "all_reduce", MIB, Topology.one_host(1), LINKS)
        assert (cost.steps, cost.busiest_bytes, cost.seconds) == (0, 0.0, 0.0)


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the topology has 3 ranks, the schedule 4"):
        of_schedule(build("ring", "all_reduce", Topology.flat(4)), MIB, Topology.flat(3), LINKS)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="nbytes must be zero or more, got -1"):
        predict("ring", "all_reduce", -1, Topology.flat(4), LINKS)
