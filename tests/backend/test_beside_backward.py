"""Collectives in flight on a group while a backward of our DistributedDataParallel runs on it.

An asynchronous all_reduce of a loss beside a backward ended in a false MismatchError, or in waiting out 30 minutes:
with 4 ranks after some 70 steps, with large tensors after 3, with sparse gradients without any call of the user's.
Memory that all ranks allocate together (`shared_empty`, a reducer of buckets, a sharded optimizer) overtook what was
queued: a false mismatch at the first iteration. csrc/reducer.h has the protocol, test_interleavings.py tries it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn

import phalanx
from phalanx import DistributedDataParallel
from phalanx.errors import MismatchError

LARGE = 1 << 20


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16, sparse=True)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, rows):
        return self.layers(self.embedding(rows))


def _steps(ddp, rank, world_size, steps, size):
    alone = _Model()
    alone.load_state_dict(ddp.module.state_dict())
    metric = torch.empty(size)
    for step in range(steps):
        batches = [torch.randint(20, (3,), generator=torch.Generator().manual_seed(step * 10 + r)) for r in range(4)]
        loss = ddp(batches[rank]).square().mean()
        metric.fill_(rank + step)
        work = dist.all_reduce(metric, async_op=True)
        loss.backward()
        work.wait()
        assert metric[0] == metric[-1] == sum(range(world_size)) + step * world_size
        for batch in batches[:world_size]:
            (alone(batch).square().mean() / world_size).backward()
        for mine, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_dense(), wanted.grad.to_dense())
        ddp.zero_grad(set_to_none=True)
        alone.zero_grad(set_to_none=True)


@pytest.mark.slow
@on_ranks(4)
def test_collectives_beside_a_backward_and_allocations_behind_them(rank, world_size):
    ddp = DistributedDataParallel(_Model(), bucket_cap_mb=0.001, check=False)
    _steps(ddp, rank, world_size, 60, 1)
    _steps(ddp, rank, world_size, 5, LARGE)
    for step in range(10):
        total = torch.full((LARGE,), float(step))
        work = dist.all_reduce(total, async_op=True)
        shared = phalanx.shared_empty(100)
        if step == 5:
            another = DistributedDataParallel(nn.Linear(4, 4), check=False)
            phalanx.ZeroRedundancyOptimizer(another.parameters(), torch.optim.SGD, lr=0.1)
        dist.all_reduce(shared.fill_(1.0))
        work.wait()
        assert total[0] == total[-1] == step * world_size
        assert torch.equal(shared, torch.full((100,), float(world_size)))


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(3)
def test_a_rank_in_a_collective_that_the_others_do_not_make_is_told_at_once_beside_a_backward(rank, async_op):
    ddp = DistributedDataParallel(nn.Linear(4, 4), check=False)

    def step():
        work = dist.all_reduce(torch.ones(3), async_op=True)
        loss = ddp(torch.ones(2, 4)).sum()
        if rank == 1:
            more = dist.all_reduce(torch.ones(5), async_op=async_op)
            if async_op:
                more.wait()
        loss.backward()
        work.wait()
        dist.barrier()

    with pytest.raises(MismatchError, match=r"(?s)all_reduce.*test_beside_backward.py:"):
        step()


@on_ranks(2)
def test_two_backwards_in_another_order_on_one_rank_are_told_at_once(rank):
    """Rounds of gradients pass no sync where ranks would compare their calls: both sides waited out the timeout."""
    first, second = (DistributedDataParallel(nn.Linear(4, 4), check=False) for _ in range(2))
    losses = [ddp(torch.ones(2, 4)).sum() for ddp in (first, second)]

    def go_back():
        for loss in reversed(losses) if rank == 1 else losses:
            loss.backward()

    with pytest.raises(MismatchError):
        go_back()
