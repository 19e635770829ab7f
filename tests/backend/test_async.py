"""Asynchronous, coalesced and sparse calls: the same values, later, in order, through works and futures."""

import threading

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import assert_same, tensor_of
from tests.on_ranks import on_ranks
from tests.threads import map_in_threads
from torch.distributed.distributed_c10d import _coalescing_manager

WORLD_SIZES = (1, 3)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_asynchronous_calls_run_in_order_and_mix_with_synchronous_ones(rank, world_size):
    first, second, third = (torch.full((50_000,), float(rank + i)) for i in range(3))
    one = dist.all_reduce(first, async_op=True)
    two = dist.broadcast(second, 0, async_op=True)
    dist.all_reduce(third)  # not asynchronous: waits behind the two
    assert one.is_completed()
    assert two.is_completed()
    total = sum(range(world_size))
    assert first[0] == total
    assert second[0] == 1
    assert third[-1] == total + 2 * world_size
    assert one.wait() is True
    assert one.is_success()
    assert one.exception() is None
    assert one.result()[0] is first


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_futures_carry_the_tensors_through_then(rank, world_size):
    tensor = torch.full((7,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * sum(range(world_size))] * 7
    again = work.get_future().wait()  # asked for after the end
    assert again[0].data_ptr() == tensor.data_ptr()

    outputs = [torch.zeros(3) for _ in range(world_size)]
    futures = [
        dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True).get_future(),
        dist.barrier(async_op=True).get_future(),
    ]
    torch.futures.wait_all(futures)
    assert [o[0].item() for o in outputs] == [float(r) for r in range(world_size)]

    called = threading.Event()
    dist.barrier(async_op=True).get_future().add_done_callback(lambda future: called.set())
    assert called.wait(20)


@on_ranks(2)
def test_a_callback_may_wait_for_an_operation_that_is_queued_behind_its_own(rank):
    """It hung: the thread that runs the queue was the thread that waited."""
    first, second = torch.full((50_000,), float(rank)), torch.full((50_000,), 2.0 * rank)
    held = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    one = dist.all_reduce(first, async_op=True)
    two = dist.all_reduce(second, async_op=True)
    waited = one.get_future().then(lambda future: (two.wait(), second[0].item()))
    assert waited.wait() == (True, 2.0)
    held.wait()
    dist.barrier()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_coalesced_calls_do_what_single_calls_do(rank, world_size):
    sizes = (1, 1000, 40_000)
    total = sum(range(world_size))
    for asynchronous in (False, True):
        tensors = [torch.full((n,), float(rank)) for n in sizes]
        with _coalescing_manager(async_ops=asynchronous) as block:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            block.wait()
        assert all(bool((t == total).all()) for t in tensors)

        inputs = [tensor_of(rank, n) for n in sizes]
        outputs = [torch.zeros(world_size * n) for n in sizes]
        with _coalescing_manager(async_ops=asynchronous) as block:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.all_gather_single(output, tensor)
        if asynchronous:
            block.wait()
        for n, output in zip(sizes, outputs, strict=True):
            assert_same(output, torch.cat([tensor_of(r, n) for r in range(world_size)]), n)

        inputs = [torch.full((world_size * n,), float(rank)) for n in sizes]
        outputs = [torch.zeros(n) for n in sizes]
        with _coalescing_manager(device=torch.device("cpu"), async_ops=asynchronous) as block:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_single(output, tensor)
        if asynchronous:
            block.wait()
        assert all(bool((o == total).all()) for o in outputs)

    lists = [[torch.zeros(n) for n in sizes] for _ in range(world_size)]
    dist.group.WORLD.allgather_coalesced(lists, [torch.full((n,), float(rank)) for n in sizes]).wait()
    assert [[t[0].item() for t in tensors] for tensors in lists] == [[float(r)] * 3 for r in range(world_size)]


@on_ranks(2)
def test_two_groups_work_at_once_from_two_threads(rank):
    groups = [dist.new_group() for _ in range(2)]

    def work(index):
        for n in range(20):
            tensor = torch.full((n * 50 + 1,), float(rank + index))
            dist.all_reduce(tensor, group=groups[index])
            assert tensor[-1] == 1 + 2 * index

    map_in_threads(work, range(2))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@on_ranks(2)
def test_the_future_of_an_all_gather_of_several_has_a_list_for_each(rank, world_size, backend):
    """One list of all tensors was in it, as PyTorch's own test of Gloo found."""
    inputs = [torch.full((2,), 10.0 * rank + i) for i in range(2)]
    outputs = [[torch.zeros(2) for _ in range(2 * world_size)] for _ in inputs]
    future = dist.group.WORLD.allgather(outputs, inputs).get_future()
    future.wait()
    assert [[tensor[0].item() for tensor in one] for one in future.value()] == [[0.0, 1.0, 10.0, 11.0]] * 2
