"""Encode numbers in one byte each: blocks of int8 that share a scale.

    block      x0 x1 ... x255          scale = max |x| / 127, in float32
    message    round(x0 / scale) ...   one byte each, then all scales

Bounds: |x - decoded| <= scale / 2 = max |x| / 254 for every element. So the error of a block is at most
n / 254² of its squared norm in the worst case (all n elements but one at half a step), which is 0.4% for n = 256: the
contraction that error feedback needs.

A block with a NaN or an infinity decodes to NaN throughout: visible, never clipped. Rounding is to the nearest, ties
to even, and the same bytes decode to the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127
_SCALE_BYTES = 4


def message_bytes(numel: int, block: int) -> int:
    """Return the length of the message for `numel` elements, a multiple of `block`."""
    return numel + numel // block * _SCALE_BYTES


def encode(values: Tensor, block: int) -> Tensor:
    """Return one message per row of `values`.

    Shape: (rows, n) floating, n a positive multiple of `block`; returns (rows, message_bytes(n, block)) of uint8.
    """
    rows, numel = values.shape
    blocks = values.view(rows, numel // block, block)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / _LARGEST).float()
    # A scale of zero (all zeros, or too small for float32) and one that is not finite make quotients that int8 can't
    # hold: zero stands for them. A scale of denormal precision may be too small by half: hence the clamp.
    steps = (blocks / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_LARGEST, _LARGEST)
    message = torch.empty(rows, message_bytes(numel, block), dtype=torch.uint8, device=values.device)
    message[:, :numel] = steps.to(torch.int8).view(torch.uint8).view(rows, numel)
    message[:, numel:] = scales.contiguous().view(torch.uint8).view(rows, -1)
    return message


def decode(message: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return what `encode` has left of the values: (rows, n) of `dtype`."""
    rows, length = message.shape
    numel = length * block // (block + _SCALE_BYTES)
    steps = message[:, :numel].view(torch.int8).reshape(rows, numel // block, block).to(dtype)
    # A copy, so that the scales lie where a float32 may lie.
    scales = (
        message[:, numel:]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32)
        .view(rows, numel // block, 1)
    )
    return steps.mul_(scales).view(rows, numel)
