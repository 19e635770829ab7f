"""Choose the type in which sums are computed, and divide a sum to get a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx._base.core_numbers import AVG, SUM

HALF = (torch.float16, torch.bfloat16)


def sum_of(redop: int) -> int:
    """Return the reduction that runs for `redop`: a mean is computed as a sum, which is divided once, at the end."""
    return SUM if redop == AVG else redop


def sum_dtype(dtype: torch.dtype, redop: int) -> torch.dtype:
    """Return the type in which tensors of `dtype` are reduced; for a mean of integers, the sum must fit into it."""
    if dtype in HALF:
        return torch.float32
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.uint64))
    return torch.int64 if redop == AVG and is_integer else dtype


def sum_type(tensor: Tensor, redop: int) -> Tensor:
    """Return `tensor` in the type in which it is reduced."""
    return tensor.to(sum_dtype(tensor.dtype, redop))


def divide(total: Tensor, redop: int, world_size: int) -> None:
    """Divide a sum over `world_size` ranks, in place, if `redop` is a mean; integers are rounded towards zero.

    `total` has the type that `sum_dtype` returns.
    """
    if redop != AVG:
        return
    if total.is_floating_point() or total.is_complex():
        total.div_(world_size)
    elif total.dtype == torch.uint64:  # torch cannot divide it
        signed = total.view(torch.int64)
        half = (signed >> 1) & ~(-1 << 63)  # half of the number, which fits into the signed type
        quotient = torch.div(half, world_size, rounding_mode="trunc") << 1
        rest = signed - quotient * world_size
        signed.copy_(quotient + (rest >= world_size).to(torch.int64))
    else:
        total.div_(world_size, rounding_mode="trunc")
