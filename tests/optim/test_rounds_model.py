"""The whole model of replicas that train apart: what rounds do not change, what comes later, and what may be saved."""

import random

import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.optim.averaging import KINDS
from torch import nn

import phalanx
from phalanx.errors import CheckpointError

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
_CASES = 4


class Mixed(nn.Module):
    """Parameters, some of them frozen, and buffers of any dtype; on each rank with values of its own."""

    def __init__(self, seed, rank):
        super().__init__()
        draw = random.Random(seed)
        values = torch.Generator().manual_seed(1000 * seed + rank)
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.ParameterList()
        for _ in range(draw.randint(0, 3)):
            shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 2))]
            value = torch.randint(0, 100, shape, generator=values).to(draw.choice(_DTYPES))
            self.frozen.append(nn.Parameter(value, requires_grad=False))
        for number in range(draw.randint(0, 5)):
            shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 2))]
            value = torch.randint(0, 100, shape, generator=values).to(draw.choice(_DTYPES))
            self.register_buffer(f"buffer{number}", value, persistent=draw.random() < 0.7)
        if draw.random() < 0.3:
            self.again = self.layer
        self.head = nn.Linear(2, 2)
        if draw.random() < 0.5:
            self.head.requires_grad_(False)
        torch.manual_seed(1000 * seed + rank)
        self.layer.reset_parameters()
        self.head.reset_parameters()

    def forward(self, x):
        return self.head(self.layer(x))


def _tensors(model):
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def _start(kind, model, sync_every=2):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner, outer = torch.optim.SGD(trained, lr=0.1), torch.optim.SGD(trained, lr=0.7)
    options = {"fragments": 1} if kind == "streaming" else {}
    return inner, KINDS[kind](model, inner, outer, sync_every=sync_every, **options)


def _step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@on_ranks(2)
def test_all_of_the_model_is_rank_0s_at_construction(rank, backend):
    expected = [_tensors(Mixed(seed, 0)) for _ in KINDS for seed in range(_CASES)]
    found = []
    for kind in KINDS:
        for seed in range(_CASES):
            model = Mixed(seed, rank)
            _, rounds = _start(kind, model)
            found.append(_tensors(model))
            rounds.finish()
    assert_equal(found, expected)


@pytest.mark.parametrize("change", ["unfrozen", "added"])
@on_ranks(2)
def test_a_parameter_that_comes_later_is_refused_on_every_rank_and_taken_when_it_is_built_anew(change):
    for kind in KINDS:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        model[1].requires_grad_(change == "added")
        inner, rounds = _start(kind, model)
        _step(model, inner)
        if change == "added":
            model.append(nn.Linear(2, 2))
        else:
            model[1].requires_grad_(True)
        name = "2.weight" if change == "added" else "1.weight"
        with pytest.raises(RuntimeError, match=f"'{name}' needs a gradient, but was missing or frozen"):
            _step(model, inner)  # a round
        inner, rounds = _start(kind, model)
        for _ in range(2):
            _step(model, inner)
        rounds.finish()


@on_ranks(2)
def test_a_sharded_checkpoint_between_rounds_is_refused(tmp_path):
    for kind in KINDS:
        model = nn.Linear(3, 2)
        inner, rounds = _start(kind, model)
        _step(model, inner)
        parts = {"model": model, "optimizer": inner, "rounds": rounds}
        with phalanx.CheckpointManager(tmp_path / kind, sharded=True) as manager:
            with pytest.raises(CheckpointError, match="with 'rounds', ranks train separate models"):
                manager.save(1, parts)
            rounds.finish()
            manager.save(2, {"model": model})


@on_ranks(2)
def test_another_form_of_what_rounds_do_not_change_is_told(rank):
    model = nn.Linear(3, 2)
    model.register_buffer("count", torch.zeros(1 + rank, dtype=torch.int64))
    with pytest.raises(phalanx.MismatchError, match=r"rank 1 has the tensor \('count', \(2,\), 'int64'\)"):
        _start("local", model)
