"""The simulator: exact where it says so, quick where a schedule repeats itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.collectives import Link, Links, Schedule, Topology, build, ring
from phalanx.collectives.cost import of_schedule
from phalanx.collectives.simulate import simulate

LINKS = Links(intra=Link(2e-6, 5e9), inter=Link(30e-6, 1.25e8), reduce_bytes_per_s=3e9)
MIB = 1 << 20


def without_shortcut(schedule: Schedule) -> Schedule:
    """The same schedule, whose phases no longer say that they repeat themselves, so that every step is played."""
    return replace(schedule, phases=tuple(replace(phase, alike=False) for phase in schedule.phases))


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize("sizes", [[1] * 9, [4, 4, 4], [3, 1, 2], [7, 2, 5, 5], [12]])
def test_leaving_out_steps_that_repeat_gives_the_clocks_of_playing_them_all(algorithm: str, sizes: list[int]) -> None:
    topology = Topology.of_sizes(sizes)
    schedule = build(algorithm, "all_reduce", topology)
    quick = simulate(schedule, 10 * MIB, topology, LINKS)
    full = simulate(without_shortcut(schedule), 10 * MIB, topology, LINKS)
    assert quick.exact
    assert quick.seconds == pytest.approx(full.seconds, rel=1e-9)
    assert quick.first_s == pytest.approx(full.first_s, rel=1e-9)
    assert quick.transfers == full.transfers == full.played


@pytest.mark.slow
def test_a_ring_of_65536_ranks_is_exact_after_two_steps_of_131070() -> None:
    topology = Topology.flat(65_536)
    result = simulate(ring.all_reduce(65_536), 64 * MIB, topology, LINKS)
    p, s, link = 65_536, 64 * MIB, LINKS.inter
    formula = 2 * (p - 1) * (link.latency_s + s / p / link.bytes_per_s) + (p - 1) / p * s / LINKS.reduce_bytes_per_s
    assert result.exact
    assert result.transfers == 131_070 * 65_536
    assert result.played == 2 * 65_536
    assert result.seconds == pytest.approx(formula, rel=1e-9)


def test_4096_ranks_on_512_hosts_finish_sooner_in_two_levels_than_in_one_ring() -> None:
    topology = Topology.filled(4096, 8)
    two_levels = simulate(build("hierarchical", "all_reduce", topology), MIB, topology, LINKS)
    flat = simulate(build("ring", "all_reduce", topology), MIB, topology, LINKS)
    assert two_levels.exact
    assert flat.exact
    assert two_levels.seconds < flat.seconds / 4


def test_ranks_that_are_done_early_do_not_wait_for_the_others() -> None:
    # In a broadcast from rank 0 to 7 others, one after the other, the first is served long before the last.
    topology = Topology.flat(8)
    result = simulate(build("single", "broadcast", topology), MIB, topology, LINKS)
    assert result.first_s == pytest.approx(result.seconds / 7)
    assert result.slowest_rank == 0


def test_playing_is_never_slower_than_the_price_with_a_barrier_after_each_step() -> None:
    for sizes in ([2, 2], [3, 1, 2], [5, 4]):
        topology = Topology.of_sizes(sizes)
        for algorithm in ("ring", "tree", "halving_doubling", "hierarchical", "single"):
            schedule = build(algorithm, "all_reduce", topology)
            played = simulate(schedule, MIB, topology, LINKS).seconds
            assert played <= of_schedule(schedule, MIB, topology, LINKS).seconds * (1 + 1e-9)


def test_a_simulation_that_runs_out_of_its_allowance_says_so() -> None:
    topology = Topology.of_sizes([3, 3, 3, 1])
    schedule = build("hierarchical", "all_reduce", topology)
    rough = simulate(schedule, MIB, topology, LINKS, most_played=1)
    exact = simulate(schedule, MIB, topology, LINKS)
    assert exact.exact
    assert not rough.exact
    assert rough.transfers == exact.transfers
    assert rough.seconds == pytest.approx(exact.seconds, rel=0.5)


def test_more_ranks_than_promised_are_refused() -> None:
    with pytest.raises(ValueError, match="can simulate at most 65536 ranks, got 65537"):
        simulate(ring.all_reduce(65_537), 1, Topology.flat(65_537), LINKS)
