"""In which type sums are added up, and how a mean comes of one."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.core_numbers import AVG, SUM

HALF = (torch.float16, torch.bfloat16)


def sum_of(redop: int) -> int:
    """The mean is a sum until it is divided, once, at the end."""
    return SUM if redop == AVG else redop


def sum_type(tensor: Tensor) -> Tensor:
    """`tensor` in the type in which it is added up."""
    return tensor.float() if tensor.dtype in HALF else tensor


def divide(total: Tensor, redop: int, world_size: int) -> None:
    """The mean of a sum over so many ranks, in place, if that is what was asked for."""
    if redop == AVG:
        exact = total.is_floating_point() or total.is_complex()
        total.div_(world_size, rounding_mode=None if exact else "trunc")
