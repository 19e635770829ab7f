"""Names that `torch.distributed` has had since 2.14 give over our groups what its older names give over Gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx.errors import DeadlineError
from phalanx.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="these names are new in torch 2.14"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]


def _gather_list(tensor, whole, dst=None, group=None, async_op=False, group_dst=None):
    """Return the result of gather_single by `gather`, which alone Gloo has."""
    parts = None if whole is None else list(whole.view(dist.get_world_size(group), *tensor.shape).unbind())
    return dist.gather(tensor, parts, dst, group, async_op, group_dst)


def _gathers(rank, world_size, has_single):
    """gather_single and gather_into_tensor, by dtype, shape, root and way of waiting; reduce_scatter_single beside."""
    pair, values = dist.new_group([0, 1][:world_size]), []
    for number, name in enumerate(("gather_single", "gather_into_tensor")):
        gather = getattr(dist, name) if has_single else _gather_list
        for dtype in (torch.float32, torch.float64, torch.int64, torch.float16, torch.uint8):
            for shape in ((), (3,), (2, 3), (0,)):
                mine = (torch.arange(6).repeat(2)[: torch.Size(shape).numel()] + rank).reshape(shape).to(dtype)
                root = (number + len(shape)) % world_size
                count = world_size * mine.numel()
                whole = torch.zeros(count, dtype=dtype) if rank == root else None
                work = gather(mine, whole, root, async_op=bool(shape))
                if work is not None:
                    work.wait()
                values.append(None if whole is None else whole.tolist())
        if world_size > 1 and rank < 2:
            whole = torch.zeros(2, 2) if rank == 1 else None
            gather(torch.full((2,), rank + 1.0), whole, group=pair, group_dst=1)
            values.append(None if whole is None else whole.tolist())
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        part, whole = torch.zeros(2), torch.arange(2.0 * world_size) + rank
        dist.reduce_scatter_single(part, whole, op)
        values.append(part.tolist())
    return values


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_are_gloos(world_size):
    theirs, ours = (run_ranks(_gathers, world_size, name == "phalanx", backend=name) for name in ("gloo", "phalanx"))
    assert ours == theirs


@on_ranks(1)
def test_an_output_that_does_not_fit_is_refused(rank, world_size):
    told = []
    for mine, whole, dst in (
        (torch.ones(2), torch.zeros(3), rank),
        (torch.ones(2), torch.zeros(2 * world_size, dtype=torch.int64), rank),
        (torch.ones(2), None, rank),
        (torch.ones(2), torch.zeros(world_size, 4)[:, ::2], rank),
    ):
        try:
            dist.gather_single(mine, whole, dst)
            told.append("taken")
        except (ValueError, RuntimeError, TypeError):
            told.append("refused")
    assert told == ["refused"] * 4


@on_ranks(2)
def test_set_timeout_holds_from_the_next_operation(rank):
    group = dist.new_group([0, 1])
    dist.set_timeout(timedelta(seconds=1), group)
    if rank == 0:
        with pytest.raises(DeadlineError, match=r"within 1\.0 s"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.set_timeout(timedelta(seconds=77))
    assert dist.group.WORLD.options._timeout.total_seconds() == 77.0


def test_get_backend_impl_is_what_stands_behind_the_group():
    def body(rank, world_size):
        pair = dist.new_group([1, 0], group_desc="pair")
        whole, named = dist.get_backend_impl(), dist.get_backend_impl(pair, torch.device("cpu"))
        tensor = torch.ones(2)
        whole.allreduce([tensor]).wait()
        with pytest.raises(RuntimeError, match="no backend for device"):
            dist.get_backend_impl(pair, torch.device("meta"))
        return whole.rank(), whole.size(), named.size(), whole.name(), tensor.tolist()

    assert run_ranks(body, 2) == [(0, 2, 2, "phalanx", [2.0, 2.0]), (1, 2, 2, "phalanx", [2.0, 2.0])]


def test_there_are_no_windows_as_over_gloo():
    def body(rank, world_size):
        with pytest.raises(RuntimeError):
            dist._new_window()
        return dist._supports_window()

    assert [run_ranks(body, 1, backend=name) for name in ("gloo", "phalanx")] == [[False], [False]]
