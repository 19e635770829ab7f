"""Our class trains on a GPU as PyTorch's does, with torch.compile, hooks, accumulation and checkpoints in shards."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from tests.small_models import mlp
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional

import phalanx

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIZES = (12, 40, 40, 3)
WRAPPERS = (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel)


def _batch(step, device):
    generator = torch.Generator().manual_seed(step)
    pair = torch.randn(16, 12, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return [one.to(device) for one in pair]


def _train(model, rank, device, steps=4, micro_batches=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro_batches):
            x, y = _batch(100 * rank + 10 * step + part, device)
            with contextlib.nullcontext() if part == micro_batches - 1 else model.no_sync():
                functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def _convnet():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    to_images = nn.Sequential(nn.Linear(12, 3 * 8 * 8), nn.Unflatten(1, (3, 8, 8)))
    return nn.Sequential(to_images, *layers).to(memory_format=torch.channels_last)


def _as_torchs(rank, world_size, place, what):
    """Return whether our class leaves what PyTorch's leaves, over the same group, on all ranks."""
    device = place.join(rank, world_size)
    trained = []
    for wrap in WRAPPERS:
        options = {"static_graph": True} if what == "static graph" else {}
        module = _convnet() if what == "channels last" else mlp(SIZES)
        model = wrap(module.to(device), **options)
        if what == "bfloat16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if what == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        run = torch.compile(model) if what == "compiled" else model
        trained.append(_train(run, rank, device, micro_batches=3 if what == "accumulated" else 1))
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-4)
    theirs = [None] * world_size
    dist.all_gather_object(theirs, trained[0])
    return all(map(torch.equal, theirs[0], trained[0]))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "what", ["plain", "compiled", "accumulated", "static graph", "channels last", "bfloat16", "PowerSGD"]
)
def test_our_class_leaves_what_torchs_leaves(cuda, what, world_size):
    assert cuda.run(_as_torchs, world_size, what) == [True] * world_size


def _in_shards(rank, world_size, place):
    device = place.join(rank, world_size)
    model = mlp(SIZES).to(device)
    _train(model, 0, device)
    state = {"model": model.state_dict()}
    folder = os.path.join(place.folder, "shards")
    checkpoint.save(state, checkpoint_id=folder)
    fresh = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    checkpoint.load(fresh, checkpoint_id=folder)
    dist.barrier()
    return all(
        value.device == device and torch.equal(value, state["model"][name]) for name, value in fresh["model"].items()
    )


def test_torchs_sharded_checkpoint_is_saved_and_loaded_on_the_gpu(cuda):
    assert cuda.run(_in_shards, 2) == [True, True]
