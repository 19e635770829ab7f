"""TORCH_DISTRIBUTED_DEBUG, under which torch wraps and checks its own groups: over this backend nothing changes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.training import train
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

import phalanx
from phalanx.errors import MismatchError
from phalanx.testing import run_ranks


def _train(rank, wrapper, sharded):
    torch.manual_seed(0)
    model = wrapper(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = sharded(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    batches = [torch.arange(48.0).view(6, 8) / 50 + rank + step for step in range(3)]
    return [p.sum().item() for p in train(model, optimizer, batches)]


def _call(rank, world_size):
    group = dist.new_group([1, 0])
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    dist.monitored_barrier()
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    return tensor.tolist(), objects


def _work(rank, world_size, level, folder):
    dist.set_debug_level(level)  # as the variable does, which torch reads when it is imported
    store = dist.FileStore(f"{folder}/{level.name}", world_size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size)
    assert dist.get_debug_level() == level
    results = [
        _train(rank, phalanx.DistributedDataParallel, phalanx.ZeroRedundancyOptimizer),
        _train(rank, nn.parallel.DistributedDataParallel, ZeroRedundancyOptimizer),
        _call(rank, world_size),
    ]
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(torch.ones(3)) if rank == 0 else dist.barrier()
    return *results, sorted(call.split(" ")[0] for call in caught.value.calls.values())


@pytest.mark.slow
def test_training_groups_and_errors_are_what_they_are_without(tmp_path):
    detail, info, off = (
        run_ranks(_work, 2, level, str(tmp_path), init=False)
        for level in (dist.DebugLevel.DETAIL, dist.DebugLevel.INFO, dist.DebugLevel.OFF)
    )
    assert detail == info == off
    for ours, theirs, calls, disagreement in detail:
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert calls == ([1.0] * 3, [{"rank": 0}, {"rank": 1}])
        assert disagreement == ["all_reduce(SUM)", "barrier"]
