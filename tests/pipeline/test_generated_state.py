"""The state of drawn models, whose modules and parameters have several names, through a pipeline and back.

The expected state is always that of plain PyTorch, under every name.
"""

import copy
import random

import torch
from tests import training
from torch import nn

import phalanx
from phalanx.checkpoint import CheckpointManager
from phalanx.testing import run_ranks

WIDTH = 3


class Counting(nn.Module):
    """A scale with a buffer, one that is not saved, and a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("scratch", torch.zeros(WIDTH), persistent=False)
        self.note = random.random()

    def forward(self, x):
        return x * self.scale + self.shift

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Versioned(nn.Module):
    """A scale that was kept as its square root before version 2: what has no version is taken for old."""

    _version = 2

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, h):
        return h * self.scale

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2 and prefix + "scale" in state_dict:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].square()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


KINDS = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    nn.Tanh,
    Counting,
    lambda: Versioned(WIDTH),  # a pipeline lost the versions of what it loaded
)


def draw_model(seed):
    """A sequence in which modules occur again, modules have tied parameters, and some are never called."""
    draw = random.Random(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(draw.randint(3, 6)):
        if draw.random() < 0.4:
            layers.append(draw.choice(layers))
        else:
            layers.append(draw.choice(KINDS)())
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if draw.random() < 0.5:
        layers.append(nn.Linear(WIDTH, WIDTH))
        layers[-1].weight = draw.choice(linears).weight
    model = nn.Sequential(*layers)
    others = [layer for layer in layers if layer is not model[0]]
    if others and draw.random() < 0.5:
        model[0].unused = nn.ModuleList([draw.choice(others), inner := Counting(), inner])
    return model.double()


def draw_counts(seed, model, world_size):
    begins = sorted(random.Random(seed).sample(range(1, len(model)), world_size - 1))
    return [end - begin for begin, end in zip([0, *begins], [*begins, len(model)], strict=True)]


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def train(rank, world_size, seeds, folder):
    found = []
    for seed in seeds:
        model = draw_model(seed)
        counts = draw_counts(seed, model, world_size)
        try:
            pipe = phalanx.Pipeline(model, micro_batches=1, schedule="gpipe", balance=counts, loss_fn=nn.MSELoss())
        except ValueError as error:
            found.append(str(error))
            continue
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            pipe.step(batch(step), target=batch(step + 10))
            optimizer.step()
        whole = copy.deepcopy(pipe.state_dict())
        saved = {}
        for sharded in (False, True):
            manager = CheckpointManager(f"{folder}/{seed}-{sharded}", sharded=sharded)
            manager.save(1, {"model": pipe})
            saved[sharded] = manager.load().state["model"]
            other = phalanx.Pipeline(
                draw_model(seed), micro_batches=1, schedule="gpipe", balance=counts, loss_fn=nn.MSELoss()
            )
            manager.load({"model": other})
            saved["loaded", sharded] = other.state_dict()
        differing = {name: changed(value, at) for at, (name, value) in enumerate(whole.items())}
        pipe.load_state_dict(differing)
        found.append((whole, saved, pipe.state_dict()))
    return found


def changed(value, at):
    """Another value under each name, also of one tensor: plain PyTorch keeps that which it reads last."""
    return value + at if isinstance(value, torch.Tensor) else {"note": at}


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert ours[name] == value, name


def test_the_state_of_drawn_models_is_that_of_plain_pytorch_under_every_name(effort, seed, tmp_path):
    """A module that was used twice on rank 1 had its first weights under its second name, which is read last."""
    seeds = range(seed, seed + 6 * effort)
    refused = 0
    for seed, ranks in zip(seeds, zip(*run_ranks(train, 2, seeds, str(tmp_path)), strict=True), strict=True):
        if isinstance(ranks[0], str):
            assert "has buffers and is called in stages" in ranks[0]
            refused += 1
            continue
        model = draw_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(batch(step), batch(step + 10)) for step in range(2)]
        training.train(model, optimizer, batches, nn.functional.mse_loss)
        for whole, saved, reloaded in ranks:
            assert list(whole) == list(model.state_dict())
            same(whole, model.state_dict())
            for state in saved.values():
                same(state, model.state_dict())
            fresh = draw_model(seed)
            fresh.load_state_dict(saved[True])
            same(fresh.state_dict(), model.state_dict())
            fresh.load_state_dict({name: changed(value, at) for at, (name, value) in enumerate(whole.items())})
            same(reloaded, fresh.state_dict())
    assert refused < len(seeds) / 2 + 1
