"""Clip the gradients of a pipeline by their norm over the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip(
    parameters: Sequence[nn.Parameter], counted: Sequence[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> Tensor:
    """Scale the gradients of this rank's parameters, and return the norm before, equal on all ranks. All ranks call it.

    Arguments:
        counted: those of `parameters` that this rank adds to the norm; of one that several ranks have, one does.

    Raises:
        ValueError: max_norm is below zero.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in counted:
        if parameter.grad is not None:
            grad = parameter.grad.detach()
            values = grad.coalesce().values() if grad.is_sparse else grad
            if values.is_complex():  # the square of |a + bi| is that of a and that of b
                values = torch.view_as_real(values.resolve_conj())
            squares += values.double().square().sum().cpu()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    # if the norm is not a number, neither is this, as in torch
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm.float()
