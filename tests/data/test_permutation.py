"""The shuffle is a permutation, and looks like one drawn by lot.

The statistics use fixed keys, so they give the same numbers on every run. `z` is the distance of a chi-square from its
expectation in standard deviations; a network of three rounds, or one with a weaker hash, gives tens to thousands.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from phalanx.data import Permutation

LENGTHS = [1, 2, 3, 4, 5, 7, 9, 10, 25, 97, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 100_003]


def whole(length: int, key: object) -> np.ndarray:
    return Permutation(length, str(key)).take(np.arange(length, dtype=np.uint64)).astype(np.int64)


def z_of(counts: np.ndarray, expected: np.ndarray | float, freedom: int) -> float:
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def test_every_index_comes_exactly_once() -> None:
    for length in LENGTHS:
        for key in range(3):
            assert np.array_equal(np.sort(whole(length, key)), np.arange(length))


def test_an_empty_range_has_an_empty_permutation() -> None:
    assert len(Permutation(0, "key")) == 0
    assert whole(0, "key").size == 0
    with pytest.raises(IndexError, match="position 0 is outside a permutation of length 0"):
        Permutation(0, "key")[0]


@pytest.mark.parametrize("length", [2**31 + 1, 10**9, 2**52 + 3, 2**63 - 1])
def test_a_huge_range_is_mapped_into_itself_without_collisions(length: int) -> None:
    positions = np.concatenate(
        [np.arange(5000, dtype=np.uint64), np.uint64(length - 1) - np.arange(5000, dtype=np.uint64)]
    )
    indices = Permutation(length, "key").take(positions)
    assert indices.max() < length
    assert len(set(indices.tolist())) == 10_000
    bins = (indices.astype(np.float64) / length * 50).astype(int)
    assert abs(z_of(np.bincount(bins, minlength=50), 200.0, 49)) < 4


def test_one_position_is_what_the_whole_order_has_there() -> None:
    permutation = Permutation(1000, "key")
    order = whole(1000, "key")
    assert [permutation[i] for i in (0, 1, 999, -1, -1000)] == [order[i] for i in (0, 1, 999, -1, -1000)]
    with pytest.raises(IndexError, match="position 1000 is outside a permutation of length 1000"):
        permutation[1000]


def test_positions_keep_their_shape() -> None:
    positions = np.arange(24, dtype=np.uint64).reshape(2, 3, 4)
    assert np.array_equal(Permutation(24, "key").take(positions).ravel(), whole(24, "key"))
    assert np.array_equal(positions.ravel(), np.arange(24))


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    # Saved positions mean these orders: a change here would repeat and lose samples of jobs that go on.
    assert whole(10, "seed 0, epoch 0").tolist() == [4, 3, 9, 8, 7, 6, 0, 2, 5, 1]
    assert [Permutation(10**9, "seed 0, epoch 0")[i] for i in range(3)] == [569276338, 436883109, 194026508]


@pytest.mark.parametrize("length", [-1, 2**63])
def test_a_length_that_no_dataset_can_have_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"length must be from 0 to 2\*\*63 - 1"):
        Permutation(length, "key")


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_a_small_range_are_equally_likely(length: int) -> None:
    orders = math.factorial(length)
    counts = Counter(tuple(whole(length, key)) for key in range(20 * orders))
    assert len(counts) == orders
    assert abs(z_of(np.array(list(counts.values())), 20.0, orders - 1)) < 4


@pytest.mark.parametrize("length", [64, 4096, 8000])
def test_every_index_is_equally_likely_at_every_position(length: int) -> None:
    bins = 16
    counts = np.zeros(bins * bins)
    keys = min(300, 250_000 // length)
    at = np.arange(length) * bins // length
    for key in range(keys):
        counts += np.bincount(at * bins + whole(length, key) * bins // length, minlength=bins * bins)
    # The rows and columns of each table of a permutation have fixed sums, hence (bins - 1)^2 degrees of freedom, and
    # a variance that is larger than that of free draws by 1 + 1/(length - 1).
    assert abs(z_of(counts, keys * length / bins**2, (bins - 1) ** 2)) < 4


@pytest.mark.parametrize("length", [64, 4096, 8000])
@pytest.mark.parametrize("distance", [1, 2, "a row of the network"])
def test_neighbours_in_the_data_end_up_anywhere_relative_to_each_other(length: int, distance: int | str) -> None:
    step = distance if isinstance(distance, int) else 2 * ((math.isqrt(length - 1) + 2) // 2)
    bins = 32
    counts = np.zeros(bins)
    for key in range(min(300, 250_000 // length)):
        order = whole(length, key)
        gaps = (order[step:] - order[:-step]) % length  # never 0: the first bin has one value fewer than the others
        counts += np.bincount(gaps * bins // length, minlength=bins)
    values = np.full(bins, length / bins)
    values[0] -= 1
    assert abs(z_of(counts, counts.sum() * values / (length - 1), bins - 1)) < 4


@pytest.mark.parametrize("length", [64, 4096, 8000])
def test_consecutive_keys_have_nothing_in_common(length: int) -> None:
    bins = 16
    counts = np.zeros(bins * bins)
    keys = min(300, 250_000 // length)
    orders = [whole(length, f"seed 0, epoch {epoch}") for epoch in range(keys + 1)]
    same = 0
    for before, after in itertools.pairwise(orders):
        counts += np.bincount(before * bins // length * bins + after * bins // length, minlength=bins * bins)
        same += int((before == after).sum())
    assert abs(z_of(counts, keys * length / bins**2, (bins - 1) ** 2)) < 4
    assert abs(same - keys) < 5 * math.sqrt(keys)  # an index keeps its position once per pair of orders on average


@pytest.mark.parametrize("length", [4096, 8000])
def test_the_rows_and_columns_of_the_network_leave_no_trace(length: int) -> None:
    # The distinguisher of too few rounds: indices that share a half before share one after more often than by chance.
    a = 2 * ((math.isqrt(length - 1) + 2) // 2)
    index = np.arange(length)
    halves = {"l": lambda x: x % a, "r": lambda x: x // a}
    lot = np.random.default_rng(0)
    ours = [whole(length, key) for key in range(25)]
    drawn = [lot.permutation(length) for _ in range(25)]
    for before in halves.values():
        for after in halves.values():
            by_key = [pairs(before(index), after(order)) for order in ours]
            by_lot = [pairs(before(index), after(order)) for order in drawn]
            spread = math.sqrt((np.var(by_key) + np.var(by_lot)) / 25)
            assert abs(np.mean(by_key) - np.mean(by_lot)) < 4 * spread


def pairs(before: np.ndarray, after: np.ndarray) -> int:
    """How many pairs of indices agree both before and after."""
    counts = np.bincount(before * 128 + after)  # halves of up to 8000 indices stay below 128
    return int((counts * (counts - 1) // 2).sum())
