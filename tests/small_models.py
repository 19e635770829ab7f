"""Small models, and data for them that every process can draw again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def mlp(
    sizes: Sequence[int] = (6, 9, 4), *, activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0
) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between them, made from a seed."""
    torch.manual_seed(seed)
    layers = [module for pair in itertools.pairwise(sizes) for module in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1])


def batchnorm_model(*, seed: int = 0) -> nn.Sequential:
    """Return a model whose layer 1 is a BatchNorm, and which takes 3 features."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batch_of(rank: int, step: int = 0, *, shape: Sequence[int] = (5, 6)) -> Tensor:
    """Return a rank's inputs of a step, the same ones in whatever process asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def make_data(size: int = 90) -> TensorDataset:
    """Return samples of 6 features, whose target is the sum of their squares."""
    inputs = batch_of(3, shape=(size, 6))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
