"""Collectives of tensors that were made in inference mode: other threads carry out some, and these are not in it."""

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.backend import create
from phalanx.testing import run_ranks, why_no_hosts

AVG, SUM, MAX = dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX
SIZES = (3, 300_000)


def _calls(rank, size, count, dtype, op, is_async):
    """Yield what each collective is called, the work, what it wrote, and what that must be."""

    def made(*values):
        return torch.tensor(values, dtype=dtype).repeat_interleave(count)

    ranks = torch.arange(1.0, size + 1)
    wide = {SUM: ranks.sum(), AVG: ranks.mean(), MAX: ranks.max()}[op].item()
    more = {"async_op": is_async}
    tensor = made(rank + 1.0)
    yield "all_reduce", dist.all_reduce(tensor, op=op, **more), tensor, made(wide)
    beside = torch.stack([made(rank + 1.0), made(7.0)], dim=1)
    yield "all_reduce of a column", dist.all_reduce(beside[:, 0], op=op, **more), beside[:, 0], made(wide)
    tensor = made(rank + 1.0)
    work = dist.reduce(tensor, 0, op=op, **more)
    if rank == 0:
        yield "reduce", work, tensor, made(wide)
    elif work is not None:
        work.wait()
    output, whole = made(0.0), made(*[rank + 1.0 + r for r in range(size)])
    work = dist.reduce_scatter_single(output, whole, op=op, **more)
    yield "reduce_scatter", work, output, made(wide + rank * (size if op is SUM else 1))
    tensor = made(rank + 1.0)
    yield "broadcast", dist.broadcast(tensor, size - 1, **more), tensor, made(float(size))
    output = made(*[0.0] * size)
    yield "all_gather", dist.all_gather_single(output, made(rank + 1.0), **more), output, made(*ranks.tolist())
    output = made(*[0.0] * size)
    work = dist.all_to_all_single(output, whole, **more)
    yield "all_to_all", work, output, made(*[r + 1.0 + rank for r in range(size)])
    output = made(0.0)
    work = dist.scatter(output, list(whole.chunk(size)) if rank == 0 else None, 0, **more)
    yield "scatter", work, output, made(1.0 + rank)


def _check_all(rank, world_size, *_):
    with torch.inference_mode():
        for count, dtype, op, is_async in itertools.product(
            SIZES, (torch.float32, torch.bfloat16, torch.int64), (SUM, AVG, MAX), (False, True)
        ):
            if op == AVG and not dtype.is_floating_point:
                continue
            for name, work, got, expected in _calls(rank, world_size, count, dtype, op, is_async):
                if work is not None:
                    work.wait()
                assert torch.equal(got, expected), (name, count, dtype, op, is_async)
    return True


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_several_hosts_write_tensors_of_inference_mode(sizes):
    """A mean, or half numbers, raised "Inplace update to inference tensor outside InferenceMode"."""
    assert all(on_hosts(sizes, _check_all))


def test_shared_memory_writes_tensors_of_inference_mode():
    assert all(run_ranks(_check_all, 2))


@pytest.mark.slow
def test_gloo_writes_tensors_of_inference_mode(monkeypatch):
    monkeypatch.setattr(create, "_core", None)
    assert all(run_ranks(_check_all, 2))
