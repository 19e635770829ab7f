"""The best of all cuts, compared with trying all of them."""

import itertools
import random

import pytest

from phalanx.pipeline.cut import balance


def every_cut(layers, parts):
    for ends in itertools.combinations(range(1, layers), parts - 1):
        begins = [0, *ends, layers]
        yield [end - begin for begin, end in itertools.pairwise(begins)]


def dearest(costs, counts):
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True))


def test_no_cut_is_better():
    draw = random.Random(0)
    for _ in range(200):
        costs = [draw.uniform(1, 10) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        counts = balance([costs] * parts)
        assert sum(counts) == len(costs)
        assert min(counts) >= 1
        assert dearest(costs, counts) == pytest.approx(min(dearest(costs, cut) for cut in every_cut(len(costs), parts)))


def test_among_equal_cuts_the_most_even_is_taken():
    assert balance([[4, 1, 1, 1, 1]] * 3) == [1, 2, 2]
