"""Optimizers of torch.distributed over the backend."""

import warnings

import pytest
import torch
from tests.parity.beside_gloo import assert_same_as_gloo
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def _batch(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(31 * step + rank))


@pytest.mark.parametrize("as_buckets", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_redundancy_optimizer_ends_with_the_weights_of_gloo(world_size, as_buckets):
    def train(rank, world_size):
        model = DistributedDataParallel(_model())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.02, parameters_as_bucket_view=as_buckets
        )
        for step in range(4):
            optimizer.zero_grad()
            model(_batch(step, rank)).square().mean().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        moments = optimizer.state_dict()["state"][1]["exp_avg"] if rank == 0 else None
        return [p.detach() for p in model.parameters()], moments

    ours = assert_same_as_gloo(train, world_size, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(ours[0][0], ours[1][0], strict=True))


def test_join_covers_the_model_and_its_sharded_optimizer():
    def train(rank, world_size):
        model = DistributedDataParallel(_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            for step in range(2 + rank):
                optimizer.zero_grad()
                model(_batch(step, rank)).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_same_as_gloo(train, 2, atol=1e-6)


def test_model_averaging_ends_with_the_weights_of_gloo():
    def train(rank, world_size):
        torch.manual_seed(rank)
        model = nn.Linear(6, 4)
        averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        for step in range(4):
            optimizer.zero_grad()
            model(_batch(step, rank)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_same_as_gloo(train, 2, atol=1e-6)
