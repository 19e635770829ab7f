"""Receives that are posted and over later: what they cost, how long they are waited for, and what they leave behind."""

import gc
import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.parity.beside_gloo import assert_same_as_gloo

from phalanx._comm.backend.process_group.inbox import ReceiveWork
from phalanx._comm.transport.shared_memory import PostedReceive
from phalanx.errors import ClosedError, DeadlineError
from phalanx.testing import run_ranks


class _Recorded(threading.Event):
    """It notes how long each wait for the end of an operation may take."""

    def __init__(self):
        super().__init__()
        self.limits = []

    def wait(self, timeout=None):
        self.limits.append(timeout)
        return super().wait(timeout)


class _Never:
    """It is a message that never comes, and an inbox that waits for it as long as it may."""

    is_pending = True

    def wait_for(self, work, deadline):
        deadline.wait_until(lambda: False, 0.01)


def test_a_wait_for_a_message_that_does_not_come_takes_its_limit_once():
    """It took the limit to bring the message about, and then as long again: 6 s where the error said 3.0 s."""
    work = ReceiveWork(_Never(), _Never(), torch.zeros(1))
    work._done = _Recorded()
    with pytest.raises(TimeoutError, match=r"the operation had not completed after 0\.05 s; it continues"):
        work.wait(timedelta(seconds=0.05))
    assert work._done.limits[-1] == 0.0


def test_the_groups_timeout_begins_when_a_receive_is_waited_for(tmp_path):
    """It began when the receive was posted, and ended the group of ranks that computed meanwhile."""

    def fn(rank, world_size):
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
        tensor = torch.full((2,), float(rank))
        if rank == 1:
            store.wait(["go"], timedelta(minutes=5))
            dist.send(tensor, 0)
            store.wait(["done"], timedelta(minutes=5))
            return None
        work = dist.irecv(tensor, 1)
        time.sleep(1.5)
        store.set("go", "")
        work.wait(timedelta(minutes=5))
        with pytest.raises(DeadlineError, match=r"no answer from rank 1 within 1\.0 s"):
            dist.irecv(torch.zeros(1), 1).wait()
        store.set("done", "")
        return tensor.tolist()

    assert run_ranks(fn, 2, init=False)[0] == [1.0, 1.0]


@on_ranks(2)
def test_a_receive_from_a_group_that_another_thread_closes_does_not_succeed(rank):
    group = dist.group.WORLD
    context, inbox = group.call_context(None), group.messages.inbox
    dist.barrier()
    group.shutdown()  # by another thread, just before the core is called
    with pytest.raises(ClosedError):
        inbox.post(torch.zeros(3), 1 - rank, 0, context).wait()


def test_what_a_message_costs_does_not_depend_on_how_many_receives_are_posted(monkeypatch):
    """Each post, and each message, asked all posted receives for their status: 4,000 took over a minute."""
    asked = []
    monkeypatch.setattr(ReceiveWork, "is_pending", property(lambda work: asked.append(1) or work.receive.is_pending))

    def check(rank, world_size):
        count = 500
        if rank == 0:
            tensors = [torch.zeros(1) for _ in range(count)]
            works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
            dist.barrier()
            for work in works:
                work.wait()
            assert [tensor.item() for tensor in tensors] == list(range(count))
            assert len(asked) < 20 * count, len(asked)
        else:
            dist.barrier()
            for tag in range(count):
                dist.isend(torch.tensor([float(tag)]), 0, tag=tag)

    run_ranks(check, 2, start="fork")


def _num_alive():
    """Return how many events and receives this process has: a group keeps its last works for torch's C++."""
    kept = [type(thing) for thing in gc.get_objects()]
    return kept.count(threading.Event), kept.count(threading.Condition), kept.count(PostedReceive)


@on_ranks(2)
def test_works_that_are_over_and_kept_hold_no_events_and_receives(rank):
    """They lay between the tensors of messages, and pinned the memory of these: 100 MB of a process."""

    def exchange():
        works, tensors = [], []
        for tag in range(60):
            tensors.append(torch.zeros(1000))
            works.append(dist.irecv(tensors[-1], 1 - rank, tag=tag))
        dist.barrier()
        for tag in range(60):
            works.append(dist.isend(torch.ones(1000), 1 - rank, tag=tag))
            works.append(dist.all_reduce(torch.ones(1000), async_op=True))
        for work in works:
            work.wait()
        dist.barrier()

    exchange()  # the first starts threads
    gc.collect()
    before = _num_alive()
    exchange()
    gc.collect()
    for _ in range(100):  # a thread that has just said that a work is over may still hold its event
        if (alive := _num_alive()) == before:
            break
    assert alive == before


def _random_messages(rank, world_size, seed):
    """Return what rank 0 receives of messages that are sent and posted in random orders, each with a tag of its own."""
    choose = random.Random(seed)
    sends = [(choose.randrange(1, world_size), tag, choose.choice([1, 2, 3, 9_000])) for tag in range(200)]
    posts = [(src if choose.random() < 0.6 else None, tag, n) for src, tag, n in choose.sample(sends, len(sends))]
    choose.shuffle(sends)
    early = choose.randrange(len(sends))  # so many may be sent before any receive is posted
    works = []
    if rank == 0:
        tensors = {tag: torch.zeros(n) for _, tag, n in posts}
        for at, (src, tag, _) in enumerate(posts):
            if at == early:
                dist.barrier()
            works.append(dist.irecv(tensors[tag], src, tag=tag))
            if at % 50 == 49:
                works[choose.randrange(at)].is_completed()
        choose.shuffle(works)
        for work in works:
            work.wait()
        return [(tag, tensor.tolist()) for tag, tensor in sorted(tensors.items())]
    for at, (src, tag, n) in enumerate(sends):
        if at == early:
            dist.barrier()
        if src == rank:
            works.append(dist.isend(torch.full((n,), float(1000 * rank + tag)), 0, tag=tag))
    for work in works:
        work.wait()
    return None


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("seed", range(2))
def test_messages_in_any_order_of_sending_and_posting_arrive_as_over_gloo(seed):
    assert_same_as_gloo(_random_messages, 3, seed)
