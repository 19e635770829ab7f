"""send and recv: sizes around the ring's, tags out of order, receives from anybody, batches."""

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import EVERY_DTYPE, assert_same, tensor_of

from phalanx.testing import run_ranks

# Bytes, around a line, a quarter of the ring, the ring, and several rings with a rest.
BYTES = (0, 1, 64, 65, 65_535, 65_537, 262_144, 262_145, 1_000_003)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_every_size_arrive_whole(world_size):
    def check(rank, world_size):
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

    run_ranks(check, world_size)


def test_both_may_send_large_messages_first():
    def check(rank, world_size):
        got = torch.zeros(2_000_000, dtype=torch.uint8)
        sending = dist.isend(tensor_of(rank, 2_000_000, torch.uint8), 1 - rank)
        dist.irecv(got, 1 - rank).wait()
        sending.wait()
        assert_same(got, tensor_of(1 - rank, 2_000_000, torch.uint8), rank)

    run_ranks(check, 2)


def test_tags_may_be_received_out_of_order_and_keep_their_order_within_a_tag():
    def check(rank, world_size):
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

    run_ranks(check, 2)


def test_a_receive_from_anybody_says_who_sent():
    def check(rank, world_size):
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

    run_ranks(check, 4)


def test_a_receive_from_anybody_may_follow_one_that_still_waits():
    """Receives from anybody look into every channel, so they share a thread with all others: it must not wait in
    the caller for a receive whose message is sent only later."""

    def check(rank, world_size):
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

    run_ranks(check, 2, timeout=30)


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_of_sends_and_receives_in_any_order(world_size):
    def check(rank, world_size):
        peers = [r for r in range(world_size) if r != rank]
        got = {r: torch.zeros(80_000) for r in peers}
        operations = [dist.P2POp(dist.isend, torch.full((80_000,), float(rank)), r) for r in peers]
        operations += [dist.P2POp(dist.irecv, got[r], r) for r in reversed(peers)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert all(bool((tensor == r).all()) for r, tensor in got.items())

    run_ranks(check, world_size)


def test_objects_are_sent_and_received():
    def check(rank, world_size):
        if rank == 0:
            dist.send_object_list(["one", {"two": 2}], 1)
        else:
            objects = [None, None]
            assert dist.recv_object_list(objects, 0) == 0
            assert objects == ["one", {"two": 2}]

    run_ranks(check, 2)


def test_messages_flow_while_a_collective_waits():
    def check(rank, world_size):
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

    run_ranks(check, 2)
