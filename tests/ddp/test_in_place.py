"""Large gradients are written by autograd where all ranks read them, and are ordinary tensors all the same."""

import errno
import functools
import gc
import os

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.ddp.models import mean_gradients, wide_model
from tests.on_ranks import on_ranks
from tests.small_models import batch_of
from tests.training import copy_gradients
from torch import nn

from phalanx import DistributedDataParallel, _core, shared_empty
from phalanx._comm.symmetric_memory import pool
from phalanx._comm.symmetric_memory.pool import SharedPool
from phalanx.testing import run_ranks

_WIDTH = 300  # 300 x 300 floats: above the size from which a gradient is written in place


_build = functools.partial(wide_model, _WIDTH)
_batch = functools.partial(batch_of, shape=(4, _WIDTH))


def _mean(world_size, step=0):
    return mean_gradients(_build(), [_batch(rank, step) for rank in range(world_size)])


def _in_place(ddp):
    """Positions of the parameters whose gradients lie in the pool."""
    pool = ddp._reducer._set.pool
    return [i for i, p in enumerate(ddp.parameters()) if p.grad is not None and pool.contains(p.grad)]


def _step(ddp, rank, step=0, **zero):
    ddp.zero_grad(**zero)
    ddp(_batch(rank, step)).square().mean().backward()


@pytest.mark.slow(but=("2-False",))
@pytest.mark.parametrize(("world_size", "set_to_none"), [(2, False), (3, True)])
def test_large_gradients_are_averaged_where_autograd_wrote_them(world_size, set_to_none):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(_build())
        for step in range(3):
            _step(ddp, rank, step, set_to_none=set_to_none)
            assert _in_place(ddp) == [0, 2]
            torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, step))
        return copy_gradients(ddp)

    first, *others = run_ranks(fn, world_size)
    for other in others:
        assert_equal(other, first)


@on_ranks(2)
def test_freed_gradients_make_room_for_the_next_step(rank):
    ddp = DistributedDataParallel(_build())
    for step in range(10):
        _step(ddp, rank, step)
    assert ddp._reducer._set.pool._pool.used() == 2
    ddp.zero_grad()
    assert ddp._reducer._set.pool._pool.used() == 0


@on_ranks(2)
def test_gradients_that_are_all_kept_leave_the_pool_empty_and_are_copied(rank, world_size):
    ddp = DistributedDataParallel(_build())
    kept = []
    for step in range(5):
        _step(ddp, rank, step)
        kept.append([p.grad for p in ddp.parameters()])
        torch.testing.assert_close(kept[-1], _mean(world_size, step))
    assert _in_place(ddp) == []
    torch.testing.assert_close(kept[0][0], _mean(world_size, 0)[0])


@on_ranks(2)
def test_gradients_outlive_the_module_and_the_group(rank, world_size):
    ddp = DistributedDataParallel(_build())
    _step(ddp, rank)
    grads = [p.grad for p in ddp.parameters()]
    del ddp
    dist.destroy_process_group()
    torch.testing.assert_close(grads, _mean(world_size))
    grads.clear()


@on_ranks(2)
def test_only_tensors_of_a_backward_come_from_the_pool(rank, world_size):
    ddp = DistributedDataParallel(_build())
    _step(ddp, rank)
    ddp.zero_grad()
    pool = ddp._reducer._set.pool
    assert not pool.contains(torch.empty(_WIDTH, _WIDTH))
    output = ddp(_batch(rank))
    output.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    _step(ddp, rank, 1)  # the forward closes the one that was interrupted
    assert not pool.contains(torch.empty(_WIDTH, _WIDTH))
    torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, 1))


def test_gradients_of_other_layouts_come_out_right():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)
            self.spectrum = nn.Parameter(torch.randn(200, 200, dtype=torch.complex64))
            self.column = nn.Parameter(torch.randn(300, 300).t())

        def forward(self, x):
            return self.conv(x).mean() + (self.spectrum * 2j).abs().mean() + (self.column @ self.column).mean()

    def batch(rank):
        return torch.randn(2, 64, 5, 5, generator=torch.Generator().manual_seed(rank))

    def fn(rank, world_size):
        torch.manual_seed(1)
        model = Net()
        ddp = DistributedDataParallel(model)
        expected = {}
        for r in range(world_size):
            model.zero_grad()
            model(batch(r)).backward()
            for name, parameter in model.named_parameters():
                expected[name] = expected.get(name, 0) + parameter.grad / world_size
        for _ in range(2):
            ddp.zero_grad()
            ddp(batch(rank)).backward()
            torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected)

    run_ranks(fn, 2)


@on_ranks(2)
def test_a_forked_child_that_frees_gradients_leaves_its_parent_alone(rank, world_size):
    ddp = DistributedDataParallel(_build())
    _step(ddp, rank)
    child = os.fork()
    if child == 0:
        ddp.zero_grad()
        _build()(_batch(0)).sum().backward()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size))
    _step(ddp, rank, 1)
    torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, 1))


@on_ranks(2)
def test_a_hook_gets_buckets_of_many_gradients_as_in_pytorch(rank, world_size):
    ddp = DistributedDataParallel(_build())
    assert len(ddp.plan.buckets) == 3
    sizes = []

    def hook(state, bucket):
        sizes.append(len(bucket.gradients()))
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    _step(ddp, rank)
    assert sizes == [6]
    torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size))


def test_gradients_are_copied_where_the_allocator_cannot_be_reached(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(_core, "Pool", refuse)

    def fn(rank, world_size):
        ddp = DistributedDataParallel(_build())
        for step in range(2):
            _step(ddp, rank, step)
            assert _in_place(ddp) == []
            torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, step))

    run_ranks(fn, 2)


def test_a_plan_takes_one_block_of_the_heap_however_many_buckets_it_has():
    """Each bucket had a block, and large gradients have a bucket each: a mixture of experts with some 2,000 of them
    ended its first backward, where old and new buckets meet, in "4096 blocks are in use"."""

    def fn(rank, world_size):
        blocks = []
        for layers in (1, 12):
            ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))))
            for step in range(2):
                _step(ddp, rank, step)
            placement = dist.group.WORLD.transport.symm_mem._placement  # of the rank that places
            blocks.append(0 if placement is None else len(placement.live))
            del ddp
            gc.collect()
            dist.barrier()
        return blocks

    (few, many), _ = run_ranks(fn, 2)
    assert few == many


def _allocate(nbytes):
    return shared_empty(nbytes, dtype=torch.uint8)


@on_ranks(2)
def test_a_pool_that_a_finalizer_closes_inside_a_sweep_is_not_lost():
    """The sweep wrote back the list that it had read; what a finalizer had added meanwhile was gone, and with it the
    memory of gradients in use."""
    pools = [SharedPool(dist.group.WORLD.symm_mem, {_WIDTH * _WIDTH * 4: 1}, _allocate) for _ in range(3)]
    held = []
    for number, shared in enumerate(pools):
        held.append(shared.empty_strided((_WIDTH, _WIDTH), (_WIDTH, 1), torch.float32).fill_(number))

    class Closing:  # stands in the list of closed pools; the sweep's question to it is when a finalizer runs
        def delete(self):
            if pools[1]._pool is not None:
                pools[1].close()
            return True

    pool._closed[Closing()] = None
    pools[0].close()
    assert len(pool._closed) == 2  # both are in use
    assert [float(one.mean()) for one in held] == [0, 1, 2]
    held.clear()
    pools[2].close()
    assert not pool._closed
