"""A rank that waits for a small message looks for it a while, but not where other threads want its core."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.transport.hierarchical import inboxes
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
CALLS = 30


def _count_looks(rank, world_size, machines, core_is_wanted):
    """Count how often a rank gives its core away in some calls, to each of which the other comes late."""
    yield_core, count = os.sched_yield, 0
    group = dist.new_group(backend="phalanx")
    dist.barrier(group=group)

    def counted():
        nonlocal count
        count += 1
        if core_is_wanted:
            time.sleep(0.001)  # so long another thread has the core
        else:
            yield_core()

    inboxes._CROWDED_S = 5e-4 if core_is_wanted else 1e9  # a busy machine takes the core away whenever it likes
    os.sched_yield = counted
    group.transport.session.leaders.inboxes._without_looks = 0  # the machine may have been busy before
    try:
        for n in range(CALLS):
            tensor = torch.tensor([float(n + rank)])
            if rank:
                time.sleep(0.005)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2 * n + 1
    finally:
        os.sched_yield = yield_core
    return count


def test_it_does_not_look_for_the_next_messages_after_another_thread_has_had_the_core():
    """It looked 200 times for each message, which on a crowded core kept Gloo's thread from bringing it."""
    waits, _ = on_hosts((1, 1), _count_looks, True)
    assert 1 <= waits < CALLS


def test_it_looks_for_each_message_where_it_has_the_core_for_itself():
    waits, _ = on_hosts((1, 1), _count_looks, False)
    assert waits > CALLS
