"""Which segment does what in which tick."""

import itertools

from phalanx._comm.transport.hierarchical.segmented import Ticks


def test_every_segment_starts_once_takes_all_its_steps_and_ends_once():
    sizes = (0, 1, 2**19, 2**19 + 1, 2**20, 5 * 2**20, 64 * 2**20)
    for nbytes, num_steps, num_messages in itertools.product(sizes, (1, 2, 4, 6, 9), (1, 2, 3, 8, 100)):
        ticks = Ticks.of(nbytes, num_steps, num_messages)
        taken = [0] * ticks.num_segments
        ended = []
        for tick in range(ticks.count):
            assert ticks.opened(tick) > min(tick, ticks.num_segments - 1), (
                "a segment starts before its receives are posted"
            )
            for segment in ticks.stepping(tick):
                taken[segment] += 1
            if (done := ticks.finishing(tick)) is not None:
                ended.append(done)
        assert taken == [num_steps + 1] * ticks.num_segments  # each step's start, and the end of the last
        assert ended == list(range(ticks.num_segments))


def test_receives_are_posted_ahead_of_what_their_sender_has_under_way():
    ticks = Ticks.of(64 * 2**20, 1)
    assert ticks.opened(0) == ticks.depth + 1
    assert ticks.opened(ticks.count - 1) == ticks.num_segments


def test_small_tensors_are_not_cut_and_large_ones_into_four_segments_of_two_to_eight_mebibytes():
    assert Ticks.of(1000, 1).num_segments == 1
    assert Ticks.of(2**21, 1).num_segments == 1
    assert Ticks.of(2**22, 1).num_segments == 2
    assert [Ticks.of(nbytes, 1).num_segments for nbytes in (2**23, 2**23 + 3, 2**25)] == [4, 4, 4]
    assert Ticks.of(64 * 2**20, 1).num_segments == 8


def test_between_many_hosts_messages_are_long_and_no_more_than_some_segments_are_in_memory():
    """Each segment is cut once more, for the hosts: 4 MiB between eight went in messages of 64 KiB."""
    for num_hosts in (3, 4, 8, 16, 64):
        for nbytes in (2**19, 2**22, 2**24, 2**26, 2**30):
            segment = nbytes / Ticks.of(nbytes, 2 * (num_hosts - 1), num_hosts).num_segments
            assert segment >= min(nbytes, 2**18 * (num_hosts // 2)), (num_hosts, nbytes)
            assert segment <= max(2**23, 2**20 * (num_hosts // 2)), (num_hosts, nbytes)


def test_segments_cover_the_tensor_and_the_outer_ones_are_half_as_long():
    assert Ticks(1, 1).bounds(10) == [0, 10]
    assert Ticks(2, 1).bounds(10) == [0, 5, 10]
    assert Ticks(5, 1).bounds(800) == [0, 100, 300, 500, 700, 800]
    assert Ticks(4, 1).bounds(1) == [0, 0, 0, 0, 1]
