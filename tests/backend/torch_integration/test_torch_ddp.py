"""PyTorch's DistributedDataParallel over our groups: a forgotten sampler, or set_epoch, is told as with ours."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from tests import training
from tests.logs import logged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.testing import run_ranks


def train(rank, world_size, divided, sets_epoch, backend="phalanx"):
    """What the warnings of rank 0 are, of three epochs; the others have none."""
    if backend != "phalanx":
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    data = TensorDataset(torch.arange(80.0).reshape(40, 2))
    sampler = DistributedSampler(data, shuffle=True, seed=3) if divided else None
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with logged("phalanx.ddp") as lines:
        for epoch in range(3):
            if sets_epoch and sampler is not None:
                sampler.set_epoch(epoch)
            torch.manual_seed(epoch)
            loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
            training.train(model, optimizer, loader, torch.sum)
    return lines


def test_a_forgotten_sampler_is_told_by_rank_0():
    first, *others = run_ranks(train, 3, False, True)
    (line,) = first
    assert line.startswith(
        "torch.nn.parallel.DistributedDataParallel: all 3 ranks were given the same batch in each of the first 3 steps"
    )
    assert "sampler=phalanx.DistributedSampler(dataset)" in line
    assert others == [[], []]


def test_a_forgotten_set_epoch_is_told_by_rank_0():
    first, other = run_ranks(train, 2, True, False)
    (line,) = first
    assert "were given the batches of steps 1 to 3 again, in the same order" in line
    assert "sampler.set_epoch(epoch) before each epoch" in line
    assert other == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_without_a_mistake_is_told_nothing(world_size):
    assert run_ranks(train, world_size, True, True) == [[]] * world_size


def test_over_another_backend_nothing_is_looked_at():
    (lines,) = run_ranks(train, 1, True, False, "gloo")
    assert lines == []


def _copy_and_pickle(rank, world_size):
    model = DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(4, 2)).sum().backward()
    pickle.dumps(model)
    copied = copy.deepcopy(model.module)
    return [name for name in vars(model) if "watch" in name], copied.weight.shape


def test_a_module_is_pickled_and_copied_as_before():
    for found, shape in run_ranks(_copy_and_pickle, 2):
        assert found == []
        assert tuple(shape) == (1, 2)
