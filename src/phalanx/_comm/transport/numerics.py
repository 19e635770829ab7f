"""Choose the type in which sums are computed, and divide a sum to get a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx._base.core_numbers import AVG, SUM

HALF = (torch.float16, torch.bfloat16)
_UNSIGNED = (torch.uint16, torch.uint32)


def sum_of(redop: int) -> int:
    """Return the reduction that runs for `redop`: a mean is a sum until it is divided, once, at the end."""
    return SUM if redop == AVG else redop


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of `dtype` are summed."""
    return torch.float32 if dtype in HALF else dtype


def sum_type(tensor: Tensor) -> Tensor:
    """Return `tensor` in the type in which it is summed."""
    return tensor.to(sum_dtype(tensor.dtype))


def divide(total: Tensor, redop: int, world_size: int) -> None:
    """Divide a sum over `world_size` ranks, in place, if `redop` is a mean; integer division drops the remainder."""
    if redop != AVG:
        return
    if total.is_floating_point() or total.is_complex():
        total.div_(world_size)
    elif total.dtype in _UNSIGNED:  # torch cannot divide these
        total.copy_(torch.div(total.to(torch.int64), world_size, rounding_mode="trunc"))
    elif total.dtype == torch.uint64:
        signed = total.view(torch.int64)
        half = (signed >> 1) & ~(-1 << 63)  # half of the number, which fits into the signed type
        quotient = torch.div(half, world_size, rounding_mode="trunc") << 1
        rest = signed - quotient * world_size
        signed.copy_(quotient + (rest >= world_size).to(torch.int64))
    else:
        total.div_(world_size, rounding_mode="trunc")
