"""A schedule's views agree, cost nothing until asked for, and cut buffers evenly."""

from __future__ import annotations

import itertools

import pytest

from phalanx._comm.schedules import ring
from phalanx._comm.schedules.schedule import chunk_bounds
from phalanx.collectives import Topology, Transfer, build


@pytest.mark.parametrize(("length", "num_chunks"), [(0, 1), (0, 4), (1, 3), (10, 3), (12, 4), (7, 7), (5, 9)])
def test_chunks_cover_the_buffer_and_differ_by_at_most_one_element(length: int, num_chunks: int) -> None:
    bounds = chunk_bounds(length, num_chunks)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == length
    assert len(sizes) == num_chunks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_ring_of_three_is_the_one_in_its_docstring() -> None:
    schedule = ring.all_reduce(3)
    steps = [sorted(step.phase.transfers(step.within)) for step in schedule.steps()]
    assert steps == [
        [Transfer(0, 1, 2, 3, "reduce"), Transfer(1, 2, 0, 1, "reduce"), Transfer(2, 0, 1, 2, "reduce")],
        [Transfer(0, 1, 1, 2, "reduce"), Transfer(1, 2, 2, 3, "reduce"), Transfer(2, 0, 0, 1, "reduce")],
        [Transfer(0, 1, 0, 1, "copy"), Transfer(1, 2, 1, 2, "copy"), Transfer(2, 0, 2, 3, "copy")],
        [Transfer(0, 1, 2, 3, "copy"), Transfer(1, 2, 0, 1, "copy"), Transfer(2, 0, 1, 2, "copy")],
    ]


def test_what_each_rank_is_told_is_together_the_whole_schedule() -> None:
    schedule = build("hierarchical", "all_reduce", Topology.of_sizes([3, 1, 2]))
    whole = sorted((s.number, t) for s in schedule.steps() for t in s.phase.transfers(s.within))
    sends = sorted((s.number, t) for rank in range(6) for s in schedule.for_rank(rank) for t in s.sends)
    recvs = sorted((s.number, t) for rank in range(6) for s in schedule.for_rank(rank) for t in s.recvs)
    assert sends == whole
    assert recvs == whole


def test_one_rank_of_a_huge_ring_is_told_its_part_without_the_others() -> None:
    schedule = ring.all_reduce(65_536)
    assert schedule.num_steps == 131_070
    first = next(schedule.for_rank(65_535))
    assert first.sends == (Transfer(65_535, 0, 65_534, 65_535, "reduce"),)
    assert first.recvs == (Transfer(65_534, 65_535, 65_533, 65_534, "reduce"),)


def test_a_rank_outside_the_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.2, got 3"):
        next(ring.all_reduce(3).for_rank(3))


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_schedule_for_no_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        ring.all_reduce(world_size)


def test_a_root_outside_the_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"root must be a rank in 0\.\.3, got 4"):
        build("tree", "broadcast", Topology.flat(4), root=4)


def test_a_root_where_there_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="all_reduce has no root, got root=2"):
        build("ring", "all_reduce", Topology.flat(4), root=2)


def test_an_unknown_algorithm_gets_a_suggestion_and_the_valid_names() -> None:
    with pytest.raises(ValueError, match=r"'rnig' is unknown; did you mean 'ring'.* Valid: direct, hierarchical, ring"):
        build("rnig", "all_reduce", Topology.flat(2))


def test_an_operation_that_an_algorithm_lacks_names_those_that_have_it() -> None:
    with pytest.raises(
        ValueError, match="'tree' does not support all_gather; these do: direct, ring, halving_doubling"
    ):
        build("tree", "all_gather", Topology.flat(2))


def test_shared_memory_across_hosts_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"all ranks on one host.*these 4 ranks are on 2 hosts.*Choose 'hierarchical'"):
        build("direct", "all_reduce", Topology.of_sizes([2, 2]))


def test_dashes_and_underscores_are_one() -> None:
    assert build("halving-doubling", "all_reduce", Topology.flat(2)).algorithm == "halving_doubling"


def test_the_schedule_between_hosts_must_have_one_rank_for_each_host() -> None:
    from phalanx._comm.schedules import hierarchical

    with pytest.raises(ValueError, match="must be an all_reduce of 2 ranks, one for each host, got all_reduce of 3"):
        hierarchical.all_reduce(Topology.of_sizes([2, 2]), ring.all_reduce(3))
