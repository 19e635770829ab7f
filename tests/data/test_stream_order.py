"""The order of a stream: each sample once, shards and windows shuffled, and no rank or worker in it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tests.data.streams import draw_layout, draw_shards

from phalanx.data.permutation import WindowPermutations
from phalanx.data.stream_order import RoundRobin, StreamLayout, StreamOrder, assign_lanes


def whole(order: StreamOrder) -> list[int]:
    return order.take(np.arange(order.length, dtype=np.uint64)).tolist()


def make(lengths: list[int], key: str | None = "seed 0, epoch 0", **layout: int) -> StreamOrder:
    numbers = {"interleave": 3, "readers": 2, "block": 6, "window": 8, **layout}
    return StreamOrder(np.array(lengths, dtype=np.uint64), StreamLayout(**numbers), key)


def test_turns_are_those_of_a_loop_that_deals():
    for seed in range(100):
        draw = random.Random(seed)
        lengths, turn = [draw.randint(0, 20) for _ in range(draw.randint(1, 6))], draw.randint(1, 7)
        dealt, taken = [], [0] * len(lengths)
        while sum(taken) < sum(lengths):
            for which, length in enumerate(lengths):
                size = min(turn, length - taken[which])
                dealt += [(which, taken[which] + i) for i in range(size)]
                taken[which] += size
        turns = RoundRobin(lengths, turn)
        located = turns.locate(np.arange(sum(lengths), dtype=np.uint64))
        assert list(zip(*(one.tolist() for one in located), strict=True)) == dealt
        assert turns.length == sum(lengths)


def test_the_order_without_shuffling_is_that_of_lists_that_are_dealt():
    """Another way to the same order: the lanes as lists, the blocks as slices of them."""
    for seed in range(100):
        draw = random.Random(seed)
        lengths, layout = draw_shards(draw).lengths, StreamLayout(**draw_layout(draw))
        begins = np.cumsum((0, *lengths)).tolist()
        fitted = layout.fit(sum(map(bool, lengths)))
        lanes: list[list[int]] = [[] for _ in range(fitted.readers * fitted.interleave)]
        for shard, length in enumerate(lengths):
            min(lanes, key=len).extend(range(begins[shard], begins[shard] + length))
        readers = []
        for number in range(fitted.readers):
            mine = [list(lane) for lane in lanes[number * fitted.interleave : (number + 1) * fitted.interleave]]
            readers.append([lane.pop(0) for _ in range(max(map(len, mine))) for lane in mine if lane])
        dealt = []
        while any(readers):
            for reader in readers:
                dealt += reader[: layout.block]
                del reader[: layout.block]
        assert whole(StreamOrder(np.array(lengths, dtype=np.uint64), layout, None)) == dealt


def test_a_shuffled_order_has_each_sample_once_and_any_part_of_it_is_what_the_whole_has_there():
    for seed in range(60):
        draw = random.Random(seed)
        lengths = np.array(draw_shards(draw).lengths, dtype=np.uint64)
        order = StreamOrder(lengths, StreamLayout(**draw_layout(draw)), f"seed {seed}, epoch 3")
        all_of_it = whole(order)
        assert sorted(all_of_it) == list(range(order.length))
        some = np.array(draw.sample(range(order.length), min(10, order.length)), dtype=np.uint64)
        assert order.take(some).tolist() == [all_of_it[i] for i in some.tolist()]


def test_a_sample_stays_inside_of_its_window():
    order = make([20] * 12, interleave=1, readers=1)
    for begin in range(0, 240, 20):
        of_shard = whole(order)[begin : begin + 20]
        first = min(of_shard)
        assert sorted(of_shard) == list(range(first, first + 20))
        for window in (slice(0, 8), slice(8, 16), slice(16, 20)):
            assert sorted(of_shard[window]) == list(range(first + window.start, first + window.stop))


def test_epochs_seeds_and_windows_differ():
    orders = [whole(make([50] * 4, key)) for key in ("seed 0, epoch 0", "seed 0, epoch 1", "seed 1, epoch 0")]
    assert len(set(map(tuple, orders))) == 3
    one_shard = whole(make([4000], window=8))
    shapes = {tuple(i % 8 for i in one_shard[begin : begin + 8]) for begin in range(0, 4000, 8)}
    assert len(shapes) > 480  # of 500 windows, with 40,320 orders of each


def test_the_order_is_the_same_on_every_machine_and_in_every_release():
    # Saved positions mean these orders: a change here would repeat and lose samples of jobs that go on.
    order = whole(make([7, 5, 0, 9, 3, 8, 6, 4]))
    assert order[:12] == [15, 35, 30, 14, 33, 24, 10, 39, 21, 8, 40, 23]
    assert len(order) == 42


def test_all_orders_of_a_small_window_are_equally_likely():
    windows = np.arange(24 * 200, dtype=np.uint64)
    positions = np.tile(np.arange(4, dtype=np.uint64), len(windows))
    taken = WindowPermutations("key").take(positions, np.full_like(positions, 4), np.repeat(windows, 4))
    _, counts = np.unique(taken.reshape(-1, 4), axis=0, return_counts=True)
    assert len(counts) == 24
    assert abs(((counts - 200) ** 2 / 200).sum() - 23) / np.sqrt(2 * 23) < 4


def test_ranks_and_workers_that_divide_the_layout_read_shards_of_their_own():
    """12 lanes for each of 4 readers, steps of a block: rank r of 3 with 2 workers takes every third position, and a
    worker every second batch."""
    order = make([40] * 96, interleave=12, readers=4, block=24, window=8)
    readers: dict[tuple[int, int], set[int]] = {}
    for position, index in enumerate(whole(order)):
        step, rank = position // 24, position % 3
        readers.setdefault((rank, step % 2), set()).add(index // 40)
    assert len(readers) == 6
    assert sum(map(len, readers.values())) == 96
    assert len(set.union(*readers.values())) == 96


def test_a_step_has_samples_of_as_many_shards_as_are_interleaved():
    order = whole(make([40] * 96, interleave=12, readers=4, block=24, window=8))
    for begin in range(0, len(order), 24):
        assert len({index // 40 for index in order[begin : begin + 24]}) >= 12


def test_shards_go_to_the_lane_with_the_fewest_samples():
    assert assign_lanes(np.array([5, 1, 1, 3, 2, 2], dtype=np.uint64), 2).tolist() == [0, 1, 1, 1, 0, 1]
    assert assign_lanes(np.array([4, 4, 4, 4, 4], dtype=np.uint64), 2).tolist() == [0, 1, 0, 1, 0]


def test_few_shards_make_few_lanes():
    layout = StreamLayout(interleave=12, readers=4, block=64, window=128)
    fitted = [(layout.fit(n).interleave, layout.fit(n).readers) for n in (1, 5, 12, 23, 24, 47, 48, 1000)]
    assert fitted == [(1, 1), (5, 1), (12, 1), (12, 1), (12, 2), (12, 2), (12, 4), (12, 4)]


def test_ten_thousand_shards_of_other_lengths_cost_numbers_only():
    draw = random.Random(0)
    order = make([draw.randint(900, 1100) for _ in range(10_000)], interleave=12, readers=4, window=128)
    middle = np.arange(1000, dtype=np.uint64) + np.uint64(order.length // 2)
    assert len(set(order.take(middle).tolist())) == 1000


def test_the_layout_names_every_number_that_makes_no_sense():
    with pytest.raises(ValueError, match=r"Stream: interleave=0, window='x': each must be a number of 1 or more"):
        StreamLayout(interleave=0, readers=1, block=1, window="x")  # type: ignore[arg-type]


def test_neighbours_of_a_window_end_up_anywhere():
    """The distances of neighbours in windows of 64 are spread as those of orders drawn by lot."""
    count = 4000
    positions = np.tile(np.arange(64, dtype=np.uint64), count)
    windows = np.repeat(np.arange(count, dtype=np.uint64), 64)
    taken = WindowPermutations("key").take(positions, np.full_like(positions, 64), windows).reshape(count, 64)
    gaps = [(int(b) - int(a)) % 64 for row in taken[:, :8] for a, b in pairwise(row)]
    counts = np.bincount(gaps, minlength=64)[1:]
    expected = len(gaps) / 63
    assert abs(((counts - expected) ** 2 / expected).sum() - 62) / np.sqrt(2 * 62) < 4
