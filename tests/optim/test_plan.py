"""Which rank updates which elements."""

import itertools

import pytest

from phalanx.optim.plan import LINE, ParameterExtent, Slice, plan_cut, plan_offsets, plan_whole

SIZES = [[], [0], [1], [1000], [0, 5, 0, 33, 32, 31], [7, 100_003, 64, 1]]


def _extents(sizes, itemsize=4):
    return [ParameterExtent(size, itemsize) for size in sizes]


@pytest.mark.parametrize("plan", [plan_cut, plan_whole])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_element_of_every_parameter_is_in_exactly_one_slice(plan, world_size, sizes):
    ranks = plan(_extents(sizes), world_size)
    assert len(ranks) == world_size
    for index, size in enumerate(sizes):
        parts = sorted((s.start, s.stop) for slices in ranks for s in slices if s.index == index)
        assert parts[0][0] == 0
        assert parts[-1][1] == size
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_cuts_lie_on_lines_of_128_bytes_from_the_parameters_start(itemsize):
    for slices in plan_cut(_extents([7, 100_003, 64, 999], itemsize), 3):
        assert all(s.start * itemsize % LINE == 0 for s in slices)


@pytest.mark.parametrize(("sizes", "most"), [([5, 40_003, 64, 1], 1), ([5, 100_003, 64, 70_001, 1], 3)])
def test_cut_ranges_differ_by_a_line_at_most_for_each_large_parameter_and_for_all_small_ones(sizes, most):
    loads = [sum(-(-(s.stop - s.start) * 4 // LINE) for s in slices) for slices in plan_cut(_extents(sizes), 4)]
    assert max(loads) - min(loads) <= most


def test_a_large_parameter_is_cut_between_all_ranks_and_small_ones_together():
    large, small = 70_000, 320
    assert plan_cut(_extents([small, large, small]), 2) == (
        (Slice(0, 0, small), Slice(1, 0, 35_008)),
        (Slice(1, 35_008, large), Slice(2, 0, small)),
    )


def test_a_parameter_with_fewer_lines_than_ranks_leaves_some_with_nothing():
    assert plan_cut(_extents([33]), 4) == ((), (Slice(0, 0, 32),), (), (Slice(0, 32, 33),))


def test_whole_parameters_go_to_the_rank_that_has_the_least():
    plan = plan_whole(_extents([100, 1000, 400, 500]), 2)
    assert plan == ((Slice(1, 0, 1000),), (Slice(0, 0, 100), Slice(2, 0, 400), Slice(3, 0, 500)))


def test_parameters_start_on_lines():
    assert plan_offsets(_extents([1, 0, 33, 32])) == ([0, 128, 128, 384], 512)
