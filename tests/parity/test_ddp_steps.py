"""Training with our DistributedDataParallel against one process with the whole batch, and against PyTorch's own."""

import hashlib

import pytest
import torch
from tests.small_models import mlp
from tests.training import train
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.testing import run_ranks

STEPS = 20
BATCH = 64
SIZES = (13, 37, 24, 5)


def _batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(BATCH, 13, generator=generator)
    targets = torch.randint(5, (BATCH,), generator=generator)
    return inputs[rank::world_size], targets[rank::world_size]


def _train(model, rank, world_size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [_batch(step, rank, world_size) for step in range(STEPS)]
    return train(model, optimizer, batches, nn.functional.cross_entropy)


def _train_ours(rank, world_size):
    # Each rank starts from other weights: construction has to make them rank 0's.
    return _train(DistributedDataParallel(mlp(SIZES, seed=rank), bucket_cap_mb=0.002), rank, world_size)


def _train_torch(rank, world_size):
    return _train(nn.parallel.DistributedDataParallel(mlp(SIZES, seed=rank), bucket_cap_mb=0.002), rank, world_size)


def _digest(tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.mark.slow(but=("phalanx-2",))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_with_parts_of_a_batch_train_like_one_process_with_all_of_it(backend, world_size):
    alone = _train(mlp(SIZES, seed=0), 0, 1)
    for weights in run_ranks(_train_ours, world_size, backend=backend):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)


@pytest.mark.slow(but=("phalanx-2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_and_two_runs_end_with_the_same_bits(backend, world_size):
    digests = {_digest(weights) for _ in range(2) for weights in run_ranks(_train_ours, world_size, backend=backend)}
    assert len(digests) == 1


def test_two_ranks_on_gloo_end_with_the_bits_of_pytorchs_own():
    ours, theirs = (run_ranks(fn, 2, backend="gloo") for fn in (_train_ours, _train_torch))
    assert _digest(ours[0]) == _digest(theirs[0])
