"""PyTorch's FSDP2 (`fully_shard`) over the backend: Gloo's weights, and those of one process with the whole batch."""

import pytest
import torch
from tests.parity.beside_gloo import assert_same_as_gloo
from tests.small_models import batch_of, mlp
from tests.training import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from phalanx.testing import run_ranks

SIZES = (6, 10, 10, 3)  # 10 rows of weights are shared evenly by 2 ranks, not by 3 or 4
BATCHES = [batch_of(0, step, shape=(12, 6)) for step in range(4)]


def _train(model, rank, world_size):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return train(model, optimizer, [batch[rank::world_size] for batch in BATCHES])


def _train_sharded(rank, world_size, settings):
    model = mlp(SIZES)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return [p.full_tensor() for p in _train(model, rank, world_size)]


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_ends_with_the_weights_of_gloo_and_of_one_process(world_size):
    ours = assert_same_as_gloo(_train_sharded, world_size, {}, atol=1e-6)
    alone = _train(mlp(SIZES), 0, 1)
    for weights in ours:
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["kept after forward", "bfloat16", "offloaded"],
)
def test_fully_shard_with_its_policies_ends_with_the_weights_of_gloo(settings):
    assert_same_as_gloo(_train_sharded, 2, settings, atol=1e-6)


@pytest.mark.slow
def test_hybrid_sharding_reduces_over_both_axes_of_the_mesh():
    def train(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return _train_sharded(rank, world_size, {"mesh": mesh})

    assert_same_as_gloo(train, 4, atol=1e-6)


def test_one_rank_trains_alone():
    alone = _train(mlp(SIZES), 0, 1)
    torch.testing.assert_close(run_ranks(_train_sharded, 1, {})[0], alone, rtol=0, atol=1e-6)


def test_gradients_are_clipped_by_their_norm_over_all_ranks():
    def norm(rank, world_size):
        model = fully_shard(mlp(SIZES))
        model(BATCHES[0][rank::world_size]).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return total.full_tensor(), [p.grad.full_tensor() for p in model.parameters()]

    assert_same_as_gloo(norm, 2, atol=1e-6)
