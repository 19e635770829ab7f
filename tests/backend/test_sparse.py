"""Sums of sparse tensors: few entries go in one gather, many in three, and a rank may have none."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn

import phalanx


def _entries(rank, n, dtype, row):
    generator = torch.Generator().manual_seed(7 * rank + n)
    count = 0 if n == 0 else n * (rank + 1) % (n + 2)  # another number on each rank, on some none
    indices = torch.randint(5, (2, count), generator=generator)
    values = torch.randint(-8, 8, (count, *row), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 5, *row), check_invariants=False)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_the_sum_of_few_and_of_many_entries(rank, world_size):
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64):
        for n in (0, 1, 3, 20) if dtype == torch.float16 else (0, 1, 3, 200, 3000):
            for row in ((), (3,), (2, 2)):
                total = _entries(rank, n, dtype, row)
                dist.all_reduce(total)
                dense = sum(_entries(r, n, dtype, row).to_dense() for r in range(world_size))
                assert torch.equal(total.to_dense(), dense), (dtype, n, row)


@on_ranks(3)
def test_sparse_gradients_are_the_mean_however_many_there_are(rank, world_size):
    torch.manual_seed(0)
    ddp = phalanx.DistributedDataParallel(nn.Embedding(500, 8, sparse=True))
    for n in (1, 400, 3000):
        rows = [torch.randint(500, (n * (r + 1),), generator=torch.Generator().manual_seed(r)) for r in range(3)]
        ddp(rows[rank]).sum().backward()
        want = torch.stack([torch.bincount(batch, minlength=500) for batch in rows[:world_size]]).sum(0)
        grad = ddp.module.weight.grad
        assert grad.is_sparse
        torch.testing.assert_close(grad.to_dense(), (want / world_size)[:, None].expand(500, 8))
        ddp.zero_grad(set_to_none=True)


def _draw_form(draw):
    dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.int32])
    return dtype, (draw.choice([5, 10, 1000]), draw.choice([1, 2, 4])), draw.choice([1, 2])


def _of_form(form, rank, seed):
    dtype, shape, sparse_dim = form
    generator = torch.Generator().manual_seed(97 * seed + rank)
    count = random.Random(f"{seed} {rank}").choice([0, 1, 3, 300])
    indices = torch.stack([torch.randint(size, (count,), generator=generator) for size in shape[:sparse_dim]])
    values = torch.randint(-8, 8, (count, *shape[sparse_dim:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_sparse_tensors_of_differing_forms_are_refused_on_all_ranks_and_change_none(rank, world_size):
    """They were garbage, an index of 900 in a tensor of 10, and a crash in `to_dense`."""
    for seed in range(40):
        draw = random.Random(seed)
        forms = [_draw_form(draw)] * world_size
        if draw.random() < 0.7:
            forms[draw.randrange(world_size)] = _draw_form(draw)
        mine = _of_form(forms[rank], rank, seed)
        before = mine.to_dense().clone()
        if len(set(forms)) == 1:
            dist.all_reduce(mine)
            total = sum(_of_form(form, r, seed).to_dense() for r, form in enumerate(forms))
            assert torch.equal(mine.to_dense(), total), seed
            continue
        with pytest.raises(phalanx.MismatchError, match="the ranks' sparse tensors differ") as caught:
            dist.all_reduce(mine)
        for r, (dtype, shape, _) in enumerate(forms):
            assert str(dtype).removeprefix("torch.") in caught.value.calls[r]
            assert str(shape) in caught.value.calls[r]
        assert torch.equal(mine.to_dense(), before), seed
