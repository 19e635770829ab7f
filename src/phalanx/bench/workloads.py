"""These models are trained: one whose time goes into Python, and one whose time goes into arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """It is a model of `num_layers` linear layers, `width` wide, each with a tanh.

    `batch` is the samples per step, of all ranks.
    """

    name: str
    title: str
    num_layers: int
    width: int
    batch: int

    def build(self) -> nn.Module:
        """Return the model, the same in every process."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(self.num_layers):
            layers += [nn.Linear(self.width, self.width), nn.Tanh()]
        return nn.Sequential(*layers)

    def inputs(self) -> Tensor:
        """Return the whole batch, the same in every process; shape (batch, width)."""
        return torch.randn(self.batch, self.width, generator=torch.Generator().manual_seed(1))


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return a mean over samples, so that parts of a batch add up to the whole."""
    return model(inputs).square().mean()


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("many-small", "120 layers of 32 x 32: time goes into Python", num_layers=120, width=32, batch=64),
        Workload(
            "few-large", "4 layers of 1024 x 1024: time goes into arithmetic", num_layers=4, width=1024, batch=256
        ),
    )
}
