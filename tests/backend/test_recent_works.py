"""Works that a program keeps, and those that it drops."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks


@pytest.mark.slow
@on_ranks(2)
def test_thousands_of_works_at_once_keep_their_results(rank):
    """Works older than the 4,096 latest lost the tensors that their owner still wanted."""
    works = [dist.all_reduce(torch.full((2,), float(i)), async_op=True) for i in range(4500)]
    for work in works:
        work.wait()
    assert [work.result()[0][0].item() for work in works] == [2.0 * i for i in range(4500)]


@on_ranks(2)
def test_dropped_works_free_their_tensors_at_later_calls(rank):
    works = [dist.all_reduce(torch.full((100,), float(i)), async_op=True) for i in range(3)]
    for work in works:
        work.wait()
    tensors = [weakref.ref(work.result()[0]) for work in works]
    del works, work
    for _ in range(3):
        dist.all_reduce(torch.zeros(100), async_op=True).wait()
    gc.collect()
    assert [one() for one in tensors] == [None] * 3
