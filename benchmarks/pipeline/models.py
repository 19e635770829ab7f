"""Models of equal layers, so that half of them is half of the work; and one of unequal ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Repeated(nn.Module):
    """A linear layer that is applied many times: a cost of one's choice, with one size of parameters."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


@dataclass(frozen=True)
class Workload:
    """`build()` gives an nn.Sequential whose layers, in as many groups as there are stages, are alike."""

    name: str
    build: Callable[[], nn.Sequential]
    data: Callable[[int], Tensor]
    """A mini-batch of so many micro-batches."""


def _perceptron() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))


def _convolutional() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(8)))


def _transformer() -> nn.Sequential:
    return nn.Sequential(*(Block(256) for _ in range(8)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("perceptron", _perceptron, lambda m: torch.randn(m * 64, 1024)),
        Workload("convolutional", _convolutional, lambda m: torch.randn(m * 4, 32, 32, 32)),
        Workload("transformer", _transformer, lambda m: torch.randn(m * 2, 64, 256)),
    )
}

COSTS = (1, 1, 10, 2, 1, 5, 1, 8, 3, 1, 1, 4)


def layouts(count: int) -> list[tuple[int, ...]]:
    """Orders of the costs; the first is the one above."""
    drawn = random.Random(1)
    return [COSTS, *(tuple(drawn.sample(COSTS, len(COSTS))) for _ in range(count - 1))]


def unequal(costs: Sequence[int]) -> nn.Sequential:
    """Layers whose cost varies tenfold, and not with the size of their parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(Repeated(256, 2 * cost) for cost in costs))


class Scaled(nn.Module):
    """A layer whose activations are large and whose work is small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


def _deep_and_wide() -> nn.Sequential:
    return nn.Sequential(*(Scaled(1024) for _ in range(8)))


def _deep_and_narrow() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))


LARGE = (
    Workload("element by element", _deep_and_wide, lambda m: torch.randn(m * 1024, 1024)),
    Workload("perceptron", _deep_and_narrow, lambda m: torch.randn(m * 4096, 256)),
    Workload("transformer", _transformer, lambda m: torch.randn(m * 8, 64, 256)),
)
"""Activations of megabytes, more than weights."""
