"""What torch.fx does not see in a forward is refused, not lost; found by placing such models on two devices."""

import functools
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import phalanx
from phalanx._base.partition.layers import list_layers
from phalanx.testing import run_ranks


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))


class MakesConstants(Two):
    def forward(self, x):
        return self.two(self.one(x) + torch.arange(8)) @ torch.eye(8)


class MakesNoise(Two):
    def forward(self, x):
        return self.two(self.one(x) + torch.randn(8))


class FreezesOne(Two):
    def forward(self, x):
        with torch.no_grad():
            x = self.one(x)
        return self.two(x)


class SwitchesAutocast(Two):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.one(x)
        return self.two(x)


class Counts(Two):
    def forward(self, x):
        self.seen += 1
        return self.two(self.one(x))


class ReadsBuffer(Two):
    def forward(self, x):
        return self.two(self.one(x) + self.seen[:8] * 2)


def test_constants_that_forward_makes_do_not_depend_on_training():
    """The two traces name them differently, and the model was refused as one that depends on self.training."""
    model = MakesConstants()
    before = set(vars(model))
    layers = list_layers(model)
    assert layers.names == ["one", "two"]
    assert len(set(vars(model)) - before) == 2  # those of the graph that is used
    again = list_layers(model)
    assert again.names == layers.names


class FailsHalfWay(Two):
    def forward(self, x):
        self.hidden = self.last = self.one(x)
        return self.two(x if self.hidden.sum() > 0 else -x)


def test_a_trace_that_fails_leaves_the_model_as_it_was():
    """It kept torch.fx's proxies in the attributes that forward had set."""
    model = FailsHalfWay()
    model.last = None
    before = dict(vars(model))
    with pytest.raises(ValueError, match="cannot be cut"):
        list_layers(model)
    assert vars(model) == before


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MakesNoise, "whose values differ between calls"),
        (FreezesOne, "turns gradients or autocast on or off"),
        (SwitchesAutocast, "turns gradients or autocast on or off"),
        (Counts, "Counts cannot be cut: its forward sets self.seen"),
    ],
)
def test_what_the_graph_would_lose_is_refused(model, words):
    """`no_grad` was ignored, and its layers got gradients; noise was made once; a count stood still."""
    made = model()
    with pytest.raises(ValueError, match=words):
        list_layers(made)
    assert torch.equal(made.seen, torch.zeros(8))


def test_a_buffer_that_forward_uses_is_a_value_of_the_graph():
    """It was a constant: what was loaded into it later was not seen."""
    graph = list_layers(ReadsBuffer()).graph
    assert "seen" in [node.target for node in graph.nodes if node.op == "get_attr"]


# Attributes that forward read while it was traced: a change of one has no effect, and a warning says so.


VALUES = [0.5, 2, True, "text", None, (1, 2), [1.0, 2.0], {"a": 1, "b": [2]}, float("nan"), 3 + 4j]


class Inner(nn.Module):
    def __init__(self, values, used):
        super().__init__()
        self.lin, self.used = nn.Linear(4, 4), tuple(used)
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.lin(x) + float(self.count(self.used))

    def count(self, names):
        return sum(len(repr(getattr(self, name))) for name in names)


class Outer(Inner):
    def __init__(self, inner, values, used):
        super().__init__(values, used)
        self.inner, self.head = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(super().forward(x)))


def warned(layers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers.constants.warn_of_changes(layers.root)
    return sorted(str(one.message).split()[1].removeprefix("self.") for one in caught)


def draw_values(draw):
    values = {f"v{number}": draw.choice(VALUES) for number in range(draw.randint(1, 5))}
    copies = {name: type(value)(value) if isinstance(value, (list, dict)) else value for name, value in values.items()}
    return copies, [name for name in values if draw.random() < 0.6]


@pytest.mark.parametrize("seed", range(30))
def test_each_change_of_what_forward_read_is_told_once_and_no_other(seed):
    draw = random.Random(seed)
    inner = Inner(*draw_values(draw))
    model = Outer(inner, *draw_values(draw))
    is_entered = draw.random() < 0.5  # else the inner module is a layer, which runs as it is
    layers = list_layers(model, ["inner.lin"] if is_entered else [])
    assert "__getattribute__" not in vars(nn.Module)
    assert warned(layers) == []
    expected = []
    for prefix, module in (("", model), ("inner.", inner)):
        for name in [name for name in vars(module) if name.startswith("v")]:
            if draw.random() < 0.5:
                continue
            value = getattr(module, name)
            if isinstance(value, list):
                value.append(7)
            elif isinstance(value, dict):
                value["c"] = 7
            else:
                setattr(module, name, "another")
            if name in module.used and (is_entered or not prefix):
                expected.append(f"{prefix}{name}")
    assert warned(layers) == sorted(expected)
    assert warned(layers) == []


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.alpha, self.steps = nn.Linear(4, 4), nn.Linear(4, 4), 1.0, 0

    def forward(self, x):
        return self.b(self.a(x)) * self.alpha


@pytest.mark.parametrize("change", ["step", "forward"])
def test_a_pipeline_warns_of_an_attribute_that_is_set_after_it_was_made(change):
    """`model.alpha = 0.0` was ignored without a word: the graph had 1.0."""

    def train(rank, world_size):
        model = Scaled()
        pipe = phalanx.Pipeline(model, micro_batches=2, loss_fn=functional.mse_loss)
        x = torch.ones(4, 4)
        pipe.step(x, target=x)
        model.steps = 5  # forward does not read it
        pipe.step(x, target=x)
        model.alpha = 0.0
        words = r"Pipeline: self.alpha has changed since the model was cut. .* with 1.0. Make the attribute a buffer"
        run = functools.partial(pipe.step, target=x) if change == "step" else pipe
        with pytest.warns(UserWarning, match=words):
            run(x)
        pipe.step(x, target=x)  # it warns once

    run_ranks(train, 2)
