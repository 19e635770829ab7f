"""A rank that has its host for itself adds up where its tensor lies: nothing else changes, and nothing too early."""

import functools

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

import phalanx
from phalanx.errors import MismatchError
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
LARGE = 1_200_001  # elements: several segments


def _values(rank, dtype=torch.float32, count=LARGE):
    """Return whole numbers, so that every order of addition gives the same bits."""
    return torch.randint(-50, 50, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _expected(world_size, dtype, op):
    """Return what a single process makes of all ranks' values."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    parts = [_values(rank, dtype).to(wide) for rank in range(world_size)]
    total = parts[0]
    for part in parts[1:]:
        total = torch.maximum(total, part) if op == dist.ReduceOp.MAX else total + part
    return (total / world_size if op == dist.ReduceOp.AVG else total).to(dtype)


def _reduces(rank, world_size, machines):
    is_alone = world_size == len(machines)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            mine = _values(rank, dtype)
            version = mine._version
            dist.all_reduce(mine, op=op)
            # Elastic jobs see by it which buffers have changed. (Memory that ranks share is written by the core.)
            assert mine._version > version or not is_alone, (dtype, op)
            assert torch.equal(mine, _expected(world_size, dtype, op)), (dtype, op)
    for root in range(world_size):
        mine = _values(rank)
        dist.reduce(mine, root)
        kept = _expected(world_size, torch.float32, dist.ReduceOp.SUM) if rank == root else _values(rank)
        assert torch.equal(mine, kept), root
    # A column of a matrix is not one piece of memory; what lies beside it stays.
    matrix = torch.stack([_values(rank), _values(rank + 10)], dim=1)
    dist.all_reduce(matrix[:, 0])
    assert torch.equal(matrix[:, 0], _expected(world_size, torch.float32, dist.ReduceOp.SUM))
    assert torch.equal(matrix[:, 1], _values(rank + 10))
    whole = torch.cat([_values(8), _values(rank), _values(9)])
    dist.all_reduce(whole[LARGE : 2 * LARGE])
    assert torch.equal(whole[:LARGE], _values(8))
    assert torch.equal(whole[2 * LARGE :], _values(9))


@pytest.mark.slow(but=("sizes0",))
@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (2, 1)])
def test_sums_are_those_of_one_process_and_nothing_else_changes(sizes):
    on_hosts(sizes, _reduces)


def _differs(rank, world_size, machines, kind):
    mine = _values(rank, count=LARGE + (rank if kind == "size" else 0))
    before = mine.clone()
    call = functools.partial(dist.broadcast, src=0) if kind == "operation" and rank else dist.all_reduce
    with pytest.raises(MismatchError):
        call(mine)
    assert torch.equal(mine, before)


@pytest.mark.parametrize("kind", ["size", "operation"])
def test_a_tensor_is_unchanged_if_the_ranks_call_different_things(kind):
    on_hosts((1, 1), _differs, kind)


def _rounds(rank, world_size, machines):
    mine = _values(rank) / 7
    dist.all_reduce(mine)
    everywhere = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everywhere, mine)
    assert all(torch.equal(one, everywhere[0]) for one in everywhere)
    exact = sum(_values(r) / 7 for r in range(world_size))
    assert not torch.equal(mine, exact)
    torch.testing.assert_close(mine, exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("feedback", [False, True])
def test_what_is_rounded_on_its_way_is_the_same_everywhere(feedback):
    options = phalanx.Options(wire_dtype=torch.bfloat16, error_feedback=feedback)
    on_hosts((1, 1), _rounds, options=options)
