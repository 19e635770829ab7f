"""What an agent has to send travels in as few frames as the order allows, and nothing is lost or overtaken."""

from __future__ import annotations

from collections import deque

import pytest

from phalanx._comm.control.wire import MAX_MESSAGES
from phalanx._job.hosts.control_channel import ALL, KEY, SendQueue


def _filled(*entries: tuple[int, bytes]) -> SendQueue:
    queue = SendQueue()
    for member, data in entries:
        queue.put(member, data)
    return queue


def _batches(queue: SendQueue) -> list[list[tuple[int, bytes]]]:
    """All batches, each of which is sent at once."""
    found = []
    while len(queue):
        found.append([(member, data) for member, data in queue.next_batch()])
        queue.complete_batch()
    return found


def test_messages_to_different_members_travel_together_and_a_second_one_waits() -> None:
    queue = _filled((1, b"a"), (2, b"b"), (3, b"c"), (1, b"d"), (2, b"e"))
    assert _batches(queue) == [[(1, b"a"), (2, b"b"), (3, b"c")], [(1, b"d"), (2, b"e")]]
    assert queue.num_bytes == 0


def test_what_stands_for_one_member_in_a_row_is_one_message() -> None:
    assert _batches(_filled((1, b"a"), (1, b"b"), (2, b"c"), (2, b"d"))) == [[(1, b"a\nb"), (2, b"c\nd")]]
    lines = _batches(_filled(*[(1, b"x")] * 150))
    assert [batch[0][1].count(b"x") for batch in lines] == [64, 64, 22]


@pytest.mark.parametrize("alone", [(KEY, b"key\0value"), (ALL, b"to all"), (2, b"")])
def test_a_key_a_message_to_all_and_an_expulsion_travel_alone(alone: tuple[int, bytes]) -> None:
    queue = _filled((1, b"a"), (2, b"b"), alone, alone, (1, b"c"), (3, b"d"))
    assert _batches(queue) == [[(1, b"a"), (2, b"b")], [alone], [alone], [(1, b"c"), (3, b"d")]]


def test_a_batch_is_no_longer_than_a_frame_may_be_and_not_too_large() -> None:
    many = _batches(_filled(*((member, b"x") for member in range(MAX_MESSAGES + 10))))
    assert [len(batch) for batch in many] == [MAX_MESSAGES, 10]
    long = bytes(1 << 19)
    large = _batches(_filled((1, long), (2, long), (3, long), (4, bytes(3 << 20)), (5, b"x")))
    assert [[member for member, _ in batch] for batch in large] == [[1, 2], [3], [4], [5]]


def test_what_found_no_room_is_sent_again_first_and_holds_up_nobody_else() -> None:
    queue = _filled((1, b"a"), (2, b"b"), (3, b"c"), (1, b"d"), (2, b"e"), (3, b"f"))
    queue.next_batch()
    queue.complete_batch({2})
    assert queue.num_bytes == 4
    assert queue.next_batch() == [(2, b"b"), (1, b"d"), (3, b"f")]
    queue.complete_batch({2})
    assert queue.next_batch() == [(2, b"b\ne")]
    queue.complete_batch()
    assert not len(queue)
    assert queue.num_bytes == 0


def test_what_found_no_room_is_not_overtaken_by_what_travels_alone() -> None:
    queue = _filled((1, bytes(1 << 18)), (1, b"a"), (2, b"b"), (KEY, b"key\0value"), (2, b"c"))
    queue.next_batch()
    queue.complete_batch({1})
    assert [entry.member for entry in queue.next_batch()] == [1, 2]
    queue.complete_batch({1})
    assert [entry.member for entry in queue.next_batch()] == [1]
    queue.complete_batch()
    assert _batches(queue) == [[(1, b"a")], [(KEY, b"key\0value")], [(2, b"c")]]


def test_whatever_finds_no_room_each_member_gets_all_in_order() -> None:
    queue = SendQueue()
    expected: dict[int, list[bytes]] = {member: [] for member in range(7)}
    for number in range(500):
        member = (number * number + number // 3) % 7
        size = (1, 1 << 17, 3 << 16, 1)[number % 4] if member == 1 else 1
        expected[member].append(b"%d" % number + b" " * size)
        queue.put(member, expected[member][-1])
    got: dict[int, list[bytes]] = {member: [] for member in range(7)}
    refusals = deque([{1, 2}, set(), {0, 1, 2, 3, 4, 5, 6}, {5}, {1}] * 20)
    while len(queue):
        full = refusals.popleft() if refusals else set()
        for member, data in queue.next_batch():
            if member not in full:
                got[member] += data.split(b"\n")
        queue.complete_batch(full)
    assert got == expected


def test_a_batch_that_was_not_sent_comes_again_and_what_is_dropped_does_not() -> None:
    queue = _filled((1, b"a"), (2, b"b"), (1, b"c"))
    queue.next_batch()
    queue.drop()
    assert [entry.data for entry in queue.unsent] == [b"a", b"b"]
    queue.restore_batch()
    assert _batches(queue) == [[(1, b"a"), (2, b"b")]]


def test_what_replaces_it_is_not_joined_by_the_batch_under_way() -> None:
    queue = _filled((1, b"a"), (2, b"b"), (1, b"c"))
    queue.next_batch()
    queue.replace([entry for entry in queue.unsent if entry.member == 1])
    queue.restore_batch()
    assert queue.num_bytes == 2
    assert _batches(queue) == [[(1, b"a\nc")]]
