"""PyTorch's FSDP2 (`fully_shard`) over the backend: Gloo's weights, and those of one process with the whole batch."""

import pytest
import torch
from tests.parity.beside_gloo import assert_same_as_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from phalanx.testing import run_ranks

WIDTH = 10  # rows of the weights: shared evenly by 2 ranks, not by 3 or 4


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def _batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator)[rank::world_size]


def _train(model, rank, world_size):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(_batch(step, rank, world_size)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def _train_sharded(rank, world_size, settings):
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return [p.detach().clone() for p in _train(model, rank, world_size)]


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_ends_with_the_weights_of_gloo_and_of_one_process(world_size):
    ours = assert_same_as_gloo(_train_sharded, world_size, {}, atol=1e-6)
    alone = _train(_model(), 0, 1)
    for weights in ours:
        for mine, reference in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)


@pytest.mark.slow(but=("offloaded",))
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
    alone = _train(_model(), 0, 1)
    for mine, reference in zip(run_ranks(_train_sharded, 1, {})[0], alone, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)


def test_gradients_are_clipped_by_their_norm_over_all_ranks():
    def norm(rank, world_size):
        model = fully_shard(_model())
        model(_batch(0, rank, world_size)).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return total.full_tensor(), [p.grad.full_tensor() for p in model.parameters()]

    assert_same_as_gloo(norm, 2, atol=1e-6)
