"""What torch.fx does not see in a forward is refused, not lost; found by placing such models on two devices."""

import pytest
import torch
from torch import nn

from phalanx._base.partition.layers import list_layers


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


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MakesNoise, "whose values differ between calls"),
        (FreezesOne, "switches gradients or autocast"),
        (SwitchesAutocast, "switches gradients or autocast"),
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
