"""The ordinary loop of training, and copies of what a step changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor] | Iterable[tuple[Tensor, Tensor]],
    loss_fn: Callable[..., Tensor] = mean_square,
) -> list[Tensor]:
    """Take a step with each batch, which is inputs, or inputs and targets; return a copy of the parameters."""
    for batch in batches:
        inputs, *targets = batch if isinstance(batch, (tuple, list)) else (batch,)
        optimizer.zero_grad()
        loss_fn(model(inputs), *targets).backward()
        optimizer.step()
    return copy_parameters(model)


def copy_parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def copy_gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
