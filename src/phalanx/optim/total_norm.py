"""Compute the norm of gradients of which each rank has some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def total_norm(
    gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype, group: dist.ProcessGroup, *, foreach: bool | None
) -> Tensor:
    """Return the norm of all ranks' `gradients`, the same bits on every rank. All ranks call it, even with none.

    Shape: ().
    Cost: one all_reduce of one number.
    """
    norm = get_total_norm(gradients, norm_type, foreach=foreach)
    norm = norm.to("cpu", dtype)  # the same on all ranks, also on one that has no gradient
    if norm_type == math.inf:
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    norm = norm.pow(norm_type)
    dist.all_reduce(norm, group=group)
    return norm.pow(1 / norm_type)


def dtype_of_norm(groups: Sequence[Mapping[str, Any]]) -> torch.dtype:
    """Return the dtype of the norm over an optimizer's groups: double if any parameter is double."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if any(p.dtype in wide for group in groups for p in group["params"]) else torch.float32
