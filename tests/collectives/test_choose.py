"""The choice by cost."""

from __future__ import annotations

import pytest

from phalanx.collectives import Link, Links, Topology, choose

ETHERNET = Links(intra=Link(1e-6, 8e9), inter=Link(30e-6, 1.25e8), reduce_bytes_per_s=8e9)
MIB = 1 << 20


def test_small_buffers_go_in_few_steps_and_large_ones_in_few_bytes() -> None:
    topology = Topology.filled(6, 1)
    assert choose("all_reduce", 4, topology, ETHERNET).algorithm == "doubling"
    assert choose("all_reduce", 64 * MIB, topology, ETHERNET).algorithm in ("ring", "hierarchical")
    assert choose("all_reduce", 4, Topology.filled(16, 4), ETHERNET).algorithm == "doubling"
    assert choose("all_reduce", MIB // 16, Topology.flat(8), ETHERNET).algorithm == "halving_doubling"


def test_a_lead_smaller_than_the_error_of_the_model_is_no_reason_to_leave_the_ring() -> None:
    choice = choose("all_reduce", 64 * MIB, Topology.flat(8), ETHERNET)
    predicted = dict(choice.predicted)
    assert predicted["halving_doubling"] < predicted["hierarchical"] < 1.1 * predicted["halving_doubling"]
    assert choice.algorithm == "hierarchical"  # on hosts of one rank, a ring
    assert "hierarchical is predicted to be as fast as any (947 ms); next is halving_doubling (947 ms)" in choice.why


def test_ranks_of_one_host_use_their_memory() -> None:
    assert choose("all_reduce", MIB, Topology.one_host(4), ETHERNET).algorithm == "direct"


def test_hosts_of_several_ranks_use_two_levels_for_large_buffers() -> None:
    assert choose("all_reduce", 64 * MIB, Topology.of_sizes([2, 2]), ETHERNET).algorithm == "hierarchical"


def test_the_choice_shows_every_candidate_and_says_why() -> None:
    choice = choose("all_reduce", 64 * MIB, Topology.of_sizes([4, 4]), ETHERNET)
    names = [name for name, _ in choice.predicted]
    times = [seconds for _, seconds in choice.predicted]
    assert sorted(names) == ["doubling", "halving_doubling", "hierarchical", "ring", "single", "tree"]
    assert times == sorted(times)
    assert choice.why == (
        "all_reduce of 64 MiB over 8 ranks on 2 hosts: hierarchical is predicted to be fastest (557 ms); "
        "next is ring (947 ms)"
    )


def test_an_algorithm_can_be_forced() -> None:
    choice = choose("all_reduce", 64 * MIB, Topology.of_sizes([4, 4]), ETHERNET, algorithm="tree")
    assert choice.algorithm == "tree"
    assert "tree was asked for" in choice.why
    assert "the fastest other is hierarchical" in choice.why


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_every_operation_has_a_choice_for_every_topology(operation: str) -> None:
    for topology in (Topology.flat(1), Topology.flat(5), Topology.one_host(3), Topology.of_sizes([1, 3])):
        assert choose(operation, 0, topology, ETHERNET).predicted  # type: ignore[arg-type]


def test_an_unknown_algorithm_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'bucket' is unknown.* Valid: direct, hierarchical, ring"):
        choose("all_reduce", 4, Topology.flat(2), ETHERNET, algorithm="bucket")


def test_a_forced_algorithm_that_cannot_run_here_says_why() -> None:
    with pytest.raises(ValueError, match="'direct' needs all ranks on one host"):
        choose("all_reduce", 4, Topology.flat(2), ETHERNET, algorithm="direct")
    with pytest.raises(ValueError, match="'ring' has no broadcast; these have: direct, tree, single"):
        choose("broadcast", 4, Topology.flat(2), ETHERNET, algorithm="ring")


def test_an_unknown_operation_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="operation 'allreduce' is unknown; did you mean 'all_reduce'"):
        choose("allreduce", 4, Topology.flat(2), ETHERNET)  # type: ignore[arg-type]
