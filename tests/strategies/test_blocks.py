"""Models of drawn containers train in shards as in one process, whatever is nested or shared in them."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx import strategies
from phalanx.strategies.sharded import find_blocks
from phalanx.testing import run_ranks

WIDTH = 4


class Nest(nn.Module):
    """Layers in lists and dicts in lists, which have no forward: it calls the layers themselves."""

    def __init__(self, draw, layers):
        super().__init__()
        self.parts = draw_container(draw, layers, 0)
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.end(run(self.parts, x))


def draw_container(draw, layers, depth):
    children = [
        draw_container(draw, layers, depth + 1) if depth < 2 and draw.random() < 0.5 else draw_layer(draw, layers)
        for _ in range(draw.randint(1, 3))
    ]
    kind = draw.choice(["list", "dict", "sequential"])
    if kind == "sequential" and all(isinstance(child, (nn.Linear, nn.Tanh)) for child in children):
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({f"part{at}": child for at, child in enumerate(children)})
    return nn.ModuleList(children)


def draw_layer(draw, layers):
    """Return a new layer, one that occurs already, or one that has the weight of another."""
    chance = draw.random()
    if chance < 0.2:
        return nn.Tanh()
    layer = draw.choice(layers) if layers and chance < 0.4 else nn.Linear(WIDTH, WIDTH)
    if layers and chance > 0.75:
        layer.weight = draw.choice(layers).weight
    layers.append(layer)
    return layer


def run(module, x):
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children() if isinstance(module, nn.ModuleDict) else module:
            x = run(child, x)
        return x
    return module(x)


def draw_model(seed):
    torch.manual_seed(seed)
    return Nest(random.Random(seed), [])


def train(model, strategy):
    strategy.setup(model, lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    losses = []
    for step in range(3):
        x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
        at, count = strategy.replica_id_in_sync_group, strategy.num_replicas_in_sync
        losses.append(strategy.reduce("mean", strategy.step(x[at::count], y[at::count])).item())
    strategy.close()
    return torch.tensor(losses)


@pytest.mark.slow
def test_models_of_nested_containers_and_shared_weights_train_in_shards():
    """A list in a list, and a weight that a block shared with another, were errors inside of torch."""
    seeds = range(20)

    def fn(rank, world_size):
        torch.set_num_threads(1)
        return [train(draw_model(seed), strategies.get("sharded", shard="model")) for seed in seeds]

    alone = [train(draw_model(seed), strategies.get("single_device")) for seed in seeds]
    for found in run_ranks(fn, 2):
        for seed, ours, expected in zip(seeds, found, alone, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, msg=f"{seed}: {ours} {expected}")


def test_blocks_are_the_repeated_parts_that_share_nothing():
    def linear():
        return nn.Linear(WIDTH, WIDTH)

    plain = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), linear()))
    assert find_blocks(plain) == [plain[0], plain[2]]
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([linear(), linear()]), linear()]), "b": linear()})
    assert find_blocks(nested) == [*nested["a"][0], nested["a"][1]]
    again = nn.ModuleList([layer := linear(), layer])
    assert find_blocks(again) == [layer]
    tied = nn.Sequential(nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear()))
    tied[0][0].weight = tied[1][1].weight  # the other layers are blocks, and these two are left to the whole
    assert find_blocks(tied) == [tied[0][1], tied[1][0]]
