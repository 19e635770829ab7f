"""Optimizers of torch.distributed over the backend."""

import warnings

import pytest
import torch
from tests.comparisons import assert_equal
from tests.parity.beside_gloo import assert_same_as_gloo
from tests.small_models import batch_of, mlp
from tests.training import copy_parameters, train
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


@pytest.mark.parametrize(("world_size", "as_buckets"), [(2, True), (3, False)])
def test_zero_redundancy_optimizer_ends_with_the_weights_of_gloo(world_size, as_buckets):
    def fn(rank, world_size):
        model = DistributedDataParallel(mlp())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.02, parameters_as_bucket_view=as_buckets
        )
        weights = train(model, optimizer, [batch_of(rank, step) for step in range(4)])
        optimizer.consolidate_state_dict(to=0)
        moments = optimizer.state_dict()["state"][1]["exp_avg"] if rank == 0 else None
        return weights, moments

    ours = assert_same_as_gloo(fn, world_size, atol=1e-6)
    assert_equal(ours[0][0], ours[1][0])


def test_join_covers_the_model_and_its_sharded_optimizer():
    def fn(rank, world_size):
        model = DistributedDataParallel(mlp())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            train(model, optimizer, [batch_of(rank, step) for step in range(2 + rank)])
        return copy_parameters(model)

    assert_same_as_gloo(fn, 2, atol=1e-6)


def test_model_averaging_ends_with_the_weights_of_gloo():
    def fn(rank, world_size):
        torch.manual_seed(rank)
        model = nn.Linear(6, 4)
        averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        return train(model, optimizer, [batch_of(rank, step) for step in range(4)])

    assert_same_as_gloo(fn, 2, atol=1e-6)
