"""Several tensors in one call: which of them share memory, and what those of one process make together.

A call of several tensors is carried out one after the other. What an earlier one writes may be what a later one reads:
the same tensor twice, views that overlap. Each must be read as it was before the call:

    all_reduce_coalesced([t[:3], t[2:]])     t[:3] ◀─ sum of t[:3]      t[2:] ◀─ sum of a copy of t[2:], made before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.core_numbers import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from phalanx.transport.numerics import HALF
from phalanx.transport.tensors import write_back

_COMBINE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}
_WIDER = {torch.uint16: torch.int64, torch.uint32: torch.int64, **{dtype: torch.float32 for dtype in HALF}}
_SIGN = -(1 << 63)


def can_combine(redop: int) -> bool:
    """Whether a reduction over ranks and over the tensors of each means one thing: a mean does not."""
    return redop != AVG


def combined(tensors: Sequence[Tensor], redop: int) -> Tensor:
    """A new tensor: the reduction of tensors of one shape and dtype, in their order."""
    dtype = tensors[0].dtype
    combine = _COMBINE[redop]
    with torch.no_grad():
        if dtype == torch.uint64:  # which torch cannot reduce: as signed numbers, of which the smallest was 0
            flip = _SIGN if redop in (MIN, MAX) else 0
            signed = tensors[0].view(torch.int64) ^ flip
            for tensor in tensors[1:]:
                signed = combine(signed, tensor.view(torch.int64) ^ flip)
            return (signed ^ flip).view(dtype)
        total = tensors[0].to(_WIDER.get(dtype, dtype), copy=True)
        for tensor in tensors[1:]:
            total = combine(total, tensor.to(total.dtype))
        return total.to(dtype)


def copy_to_others(tensors: Sequence[Tensor], source: Tensor) -> None:
    """Write `source`, one of the tensors or none, to all others."""
    for tensor in tensors:
        if tensor is not source:
            write_back(tensor.detach(), source)


def unshared(inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The inputs of steps, of which each writes its `outputs`; a copy of each that an earlier step writes to.

    Cost: a copy of those. Without any, sorting as many addresses as there are tensors.
    """
    inputs = list(inputs)
    if len(inputs) < 2 or not _any_overlap([*inputs, *(t for step in outputs for t in step)], inputs, outputs):
        return inputs
    written: list[tuple[int, int]] = []
    for at, (tensor, step) in enumerate(zip(inputs, outputs, strict=True)):
        start, end = _extent(tensor)
        if any(start < other_end and other_start < end for other_start, other_end in written):
            inputs[at] = tensor.detach().clone()
        written += [_extent(output) for output in step]
    return inputs


def _any_overlap(tensors: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether two of the tensors overlap; a tensor that is its own step's input and output counts as one."""
    own = {id(tensor) for tensor, step in zip(inputs, outputs, strict=True) if len(step) == 1 and step[0] is tensor}
    extents = sorted(
        _extent(tensor) for at, tensor in enumerate(tensors) if not (at >= len(inputs) and id(tensor) in own)
    )
    reached = 0
    for start, end in extents:
        if start < end:
            if start < reached:
                return True
            reached = end
    return False


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends; nothing for a tensor without elements."""
    if not tensor.numel() or tensor._is_zerotensor():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
