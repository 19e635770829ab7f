"""Which segment does what in which turn."""

import pytest

from phalanx.transport.hierarchical.segments import Turns


@pytest.mark.parametrize("num_steps", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("nbytes", [0, 1, 2**19, 2**19 + 1, 2**20, 5 * 2**20, 64 * 2**20])
def test_every_segment_starts_once_takes_all_its_steps_and_ends_once(nbytes, num_steps):
    turns = Turns.of(nbytes, num_steps)
    taken = [0] * turns.num_segments
    ended = []
    for turn in range(turns.count):
        assert turns.opened(turn) > min(turn, turns.num_segments - 1), "a segment starts before its receives are posted"
        for segment in turns.stepping(turn):
            taken[segment] += 1
        if (done := turns.finishing(turn)) is not None:
            ended.append(done)
    assert taken == [num_steps + 1] * turns.num_segments  # each step's start, and the end of the last
    assert ended == list(range(turns.num_segments))


def test_receives_are_posted_ahead_of_what_their_sender_has_under_way():
    turns = Turns.of(64 * 2**20, 1)
    assert turns.opened(0) == turns.depth + 1
    assert turns.opened(turns.count - 1) == turns.num_segments


def test_small_tensors_are_not_cut_and_large_ones_into_segments_of_two_mebibytes():
    assert Turns.of(1000, 1).num_segments == 1
    assert Turns.of(2**20, 1).num_segments == 2
    assert Turns.of(64 * 2**20, 1).num_segments == 32


def test_segments_cover_the_tensor_and_the_outer_ones_are_half_as_long():
    assert Turns(1, 1).bounds(10) == [0, 10]
    assert Turns(2, 1).bounds(10) == [0, 5, 10]
    assert Turns(5, 1).bounds(800) == [0, 100, 300, 500, 700, 800]
    assert Turns(4, 1).bounds(1) == [0, 0, 0, 0, 1]
