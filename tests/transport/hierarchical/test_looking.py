"""A rank that waits for a small message waits itself for a moment, and then has a thread wait."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.transport.background import WHOLE_BYTES
from phalanx._comm.transport.hierarchical import inboxes
from phalanx.testing import why_no_hosts

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
CALLS = 10


def _count_threads_that_wait(rank, world_size, machines, moment_s, count):
    """Return for how many calls a thread of this rank waits, while the other rank comes late to each."""
    inboxes._MOMENT_S, inboxes._CROWDED_S = moment_s, 1e9  # a busy machine takes the core away whenever it likes
    own = dist.group.WORLD.transport.session.leaders.inboxes
    own._num_unpolled = 0  # the machine may have been busy before
    background = own._background
    start, num_started = background.start, 0

    def counted(operation):
        nonlocal num_started
        num_started += 1
        return start(operation)

    background.start = counted
    for n in range(CALLS):
        tensor = torch.full((count,), float(n + rank))
        if rank:
            time.sleep(0.005)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((count,), 2.0 * n + 1))
    return num_started


@needs_hosts
@pytest.mark.parametrize("nbytes", [4, WHOLE_BYTES, 2 * WHOLE_BYTES])
def test_no_thread_waits_for_what_arrives_within_a_moment(nbytes):
    assert on_hosts((1, 1), _count_threads_that_wait, 20.0, nbytes // 4) == [0, 0]


@needs_hosts
def test_a_thread_waits_for_what_arrives_later():
    waits, _ = on_hosts((1, 1), _count_threads_that_wait, 0.0, 1)
    assert waits == CALLS


def _count_looks(rank, world_size, machines):
    """Count how often a rank gives its core away, for a millisecond each, in calls to which the other comes late."""
    inboxes._CROWDED_S = 5e-4
    dist.all_reduce(torch.zeros(1))
    yield_core, count = os.sched_yield, 0

    def counted():
        nonlocal count
        count += 1
        time.sleep(0.001)

    os.sched_yield = counted
    try:
        for _ in range(CALLS):
            if rank:
                time.sleep(0.005)
            dist.all_reduce(torch.zeros(1))
    finally:
        os.sched_yield = yield_core
    return count


@needs_hosts
def test_it_does_not_look_for_the_next_messages_after_another_thread_has_had_the_core():
    """It looked 200 times for each message, which on a crowded core kept Gloo's thread from bringing it."""
    looks, _ = on_hosts((1, 1), _count_looks)
    assert looks < CALLS


@pytest.mark.parametrize("nbytes", [WHOLE_BYTES + 1, 2 * WHOLE_BYTES])
def test_a_long_message_has_arrived_only_with_its_end(nbytes):
    sent, received = (inboxes.MessageBuffer(2 * WHOLE_BYTES) for _ in range(2))
    message = sent.message(nbytes, number=7)
    received.tensor[: len(message)] = message
    assert received.has_arrived(nbytes, number=7)
    assert not received.has_arrived(nbytes, number=8), "what an earlier operation left there is not the end"
    received.tensor[len(message) - 1] ^= 1
    assert not received.has_arrived(nbytes, number=7)
    assert not received.has_arrived(1 << 30, number=7), "a length that is still being written"
