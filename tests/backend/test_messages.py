"""send and recv: sizes around the ring's, tags out of order, receives from anybody, batches."""

import gc
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import EVERY_DTYPE, assert_same, tensor_of
from tests.on_ranks import on_ranks
from tests.threads import map_in_threads

from phalanx.errors import PeerLostError
from phalanx.testing import run_ranks

# Bytes, around a line, a quarter of the ring, the ring, and several rings with a rest.
BYTES = (0, 1, 64, 65, 65_535, 65_537, 262_144, 262_145, 1_000_003)


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_messages_of_every_size_arrive_whole(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for size in BYTES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        if rank == 0:
            dist.send(tensor_of(rank, size, torch.uint8), right)
            assert dist.recv(tensor, left) == left
        else:
            dist.recv(tensor, left)
            dist.send(tensor_of(rank, size, torch.uint8), right)
        assert_same(tensor, tensor_of(left, size, torch.uint8), size)
    for dtype in EVERY_DTYPE:
        tensor = torch.zeros(9, dtype=dtype)
        work = dist.isend(tensor_of(rank, 9, dtype), right)
        dist.recv(tensor, left)
        work.wait()
        assert_same(tensor, tensor_of(left, 9, dtype), dtype)


@on_ranks(2)
def test_tags_may_be_received_out_of_order_and_keep_their_order_within_a_tag(rank):
    if rank == 0:
        for i in range(3):
            for tag in (1, 2, 3):
                dist.send(torch.full((100_000,), 10.0 * tag + i), 1, tag=tag)
        return
    for tag in (3, 1, 2):
        for i in range(3):
            tensor = torch.zeros(100_000)
            dist.recv(tensor, 0, tag=tag)
            assert tensor[-1] == 10 * tag + i


@on_ranks(4)
def test_a_receive_from_anybody_says_who_sent(rank, world_size):
    if rank != 0:
        dist.send(torch.full((300,), float(rank)), 0, tag=7)
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((5,), float(-rank)), 0)
        return
    heard = []
    for _ in range(world_size - 1):
        tensor = torch.zeros(300)
        heard.append((dist.recv(tensor, None, tag=7), int(tensor[-1])))
    assert sorted(heard) == [(r, r) for r in range(1, world_size)]
    for r in range(1, world_size):
        dist.send(torch.zeros(1), r)
    for r in range(1, world_size):  # from somebody, after receives from anybody
        tensor = torch.zeros(5)
        assert dist.recv(tensor, r) == r
        assert tensor[0] == -r


@on_ranks(2)
def test_a_receive_from_anybody_may_follow_one_that_still_waits(rank):
    """Receives from anybody look into every channel, so they share a thread with all others: it must not wait in
    the caller for a receive whose message is sent only later."""
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(first, 1), dist.irecv(second, None)]
        dist.send(torch.zeros(1), 1)
        for work in works:
            work.wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.tensor([1.0]), 0)
        dist.send(torch.tensor([2.0]), 0)


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_batches_of_sends_and_receives_in_any_order(rank, world_size):
    peers = [r for r in range(world_size) if r != rank]
    got = {r: torch.zeros(80_000) for r in peers}
    operations = [dist.P2POp(dist.isend, torch.full((80_000,), float(rank)), r) for r in peers]
    operations += [dist.P2POp(dist.irecv, got[r], r) for r in reversed(peers)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(bool((tensor == r).all()) for r, tensor in got.items())


@on_ranks(2)
def test_messages_flow_while_a_collective_waits(rank):
    if rank == 0:
        waiting = dist.barrier(async_op=True)
        dist.send(torch.ones(1), 1)
        tensor = torch.zeros(1)
        dist.recv(tensor, 1)
        waiting.wait()
        assert tensor.item() == 2
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((1,), 2.0), 0)
        dist.barrier()


@on_ranks(2)
def test_a_receive_that_still_waits_holds_up_no_other_tag(rank):
    """Receives from one peer once ran in the order of posting: the second waited for the first until the timeout."""
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(100_000)
        one, two = dist.irecv(first, 1, tag=1), dist.irecv(second, 1, tag=2)
        two.wait()
        assert not one.is_completed()
        dist.send(torch.zeros(1), 1)
        one.wait()
        assert (first.item(), second[-1].item()) == (1.0, 2.0)
    else:
        dist.send(torch.full((100_000,), 2.0), 0, tag=2)
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.tensor([1.0]), 0, tag=1)


@pytest.mark.parametrize("any_first", [False, True])
@on_ranks(2)
def test_receives_from_anybody_and_from_somebody_match_in_the_order_of_posting(rank, any_first):
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        for value in (1.0, 2.0):
            dist.send(torch.tensor([value]), 0, tag=4)
        return
    anybody, somebody = torch.zeros(1), torch.zeros(1)
    posts = [lambda: dist.irecv(somebody, 1, tag=4), lambda: dist.irecv(anybody, None, tag=4)]
    works = [post() for post in (reversed(posts) if any_first else posts)]
    dist.send(torch.zeros(1), 1)
    for work in reversed(works):
        work.wait()
    assert (anybody.item(), somebody.item()) == ((1.0, 2.0) if any_first else (2.0, 1.0))


@on_ranks(3)
def test_messages_come_in_while_nobody_waits_for_them_by_one_thread_for_all_tags(rank):
    if rank == 0:
        tensors = [torch.zeros(500_000) for _ in range(6)]  # several rings each: the senders wait to be read
        works = [dist.irecv(t, 1 + i % 2, tag=i) for i, t in enumerate(tensors)]
        heard = threading.Event()
        works[0].get_future().add_done_callback(lambda future: heard.set())
        dist.barrier()
        assert heard.wait(20)
        while not all(work.is_completed() for work in works):
            os.sched_yield()
        assert [t[-1].item() for t in tensors] == [0, 1, 2, 3, 4, 5]
        assert len([t for t in threading.enumerate() if "recv" in t.name]) == 1
        return
    for tag in (4, 2, 0) if rank == 1 else (5, 3, 1):
        dist.send(torch.full((500_000,), float(tag)), 0, tag=tag)
    dist.barrier()


@on_ranks(2)
def test_a_receive_whose_work_was_dropped_still_fills_its_tensor(rank):
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(3), 0, tag=1)
        dist.send(torch.zeros(1), 0, tag=2)
        return
    tensor = torch.zeros(3)
    dist.irecv(tensor, 1, tag=1)
    gc.collect()
    dist.send(torch.zeros(1), 1)
    dist.recv(torch.zeros(1), 1, tag=2)
    assert tensor.tolist() == [1, 1, 1]


@on_ranks(2)
def test_a_send_that_fits_is_over_at_once_and_one_that_does_not_is_not(rank):
    if rank == 0:
        small = dist.isend(torch.ones(1000), 1)
        assert small.is_completed()
        large = dist.isend(torch.full((1_000_000,), 2.0), 1)
        behind = dist.isend(torch.full((1,), 3.0), 1)  # fits, but must not overtake
        assert not large.is_completed()
        assert not behind.is_completed()
        dist.barrier()
        large.wait()
        behind.wait()
    else:
        dist.barrier()
        for count, value in ((1000, 1), (1_000_000, 2), (1, 3)):
            tensor = torch.zeros(count)
            assert dist.irecv(tensor, 0).wait() is True
            assert tensor[-1] == value


@on_ranks(2)
def test_a_wait_with_a_limit_ends_nothing(rank):
    if rank == 0:
        tensor = torch.zeros(1)
        work = dist.irecv(tensor, 1)
        with pytest.raises(TimeoutError, match=r"the operation had not completed after 0\.05 s; it continues"):
            work.wait(timedelta(seconds=0.05))
        dist.send(torch.zeros(1), 1)
        work.wait()
        assert tensor.item() == 1
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(1), 0)


@on_ranks(2)
def test_several_threads_may_wait_for_messages_at_once(rank):
    def talk(tag):
        for i in range(30):
            tensor = torch.zeros(i * 700)
            if rank == 0:
                dist.send(torch.full((i * 700,), float(tag + i)), 1, tag=tag)
                dist.recv(tensor, 1, tag=tag)
            else:
                dist.recv(tensor, 0, tag=tag)
                dist.send(torch.full((i * 700,), float(tag + i)), 0, tag=tag)
            assert bool((tensor == tag + i).all()), (tag, i)

    map_in_threads(talk, (100, 200, 300))


def test_destroying_a_group_takes_in_what_is_coming_and_tells_the_rest(monkeypatch):
    from phalanx._comm.backend.process_group import group as process_group

    monkeypatch.setattr(process_group, "_JOIN_S", 0.3)

    def check(rank, world_size):
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.ones(2), 0, tag=2)
            with pytest.raises(PeerLostError, match="it left the group while its operations were in flight"):
                dist.recv(torch.zeros(1), 0)
            return
        never, coming, dropped = torch.zeros(1), torch.zeros(2), torch.zeros(1)
        works = [dist.irecv(never, 1, tag=1), dist.irecv(coming, 1, tag=2)]
        dist.irecv(dropped, None, tag=3)
        dist.send(torch.zeros(1), 1)
        dist.destroy_process_group()
        works[1].wait()
        assert coming.tolist() == [1, 1]
        with pytest.raises(PeerLostError):
            works[0].wait()

    run_ranks(check, 2)
