"""Convert tensors to types that Gloo reduces, and the results back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.core_numbers import AVG
from phalanx._base.dtypes import REDUCTIONS
from phalanx._comm.transport.numerics import divide

_OP = {number: kind for kind, number in REDUCTIONS.items()} | {AVG: dist.ReduceOp.SUM}  # divided once, at the end
# A bool is a byte that is 0 or 1.
_OP_OF_BOOL = {
    dist.ReduceOp.SUM: dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN,
    dist.ReduceOp.BAND: dist.ReduceOp.MIN,
    dist.ReduceOp.BOR: dist.ReduceOp.MAX,
}
# Sums of half types are rounded once. Integers wrap around as usual: only the low bits of the wider type are kept.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_SIGN = -(1 << 63)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def operation_of(redop: int, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    """Return Gloo's reduction for our reduction number and tensors of `dtype`."""
    op = _OP[redop]
    return _OP_OF_BOOL.get(op, op) if dtype == torch.bool else op


def is_reducible(redop: int, dtype: torch.dtype) -> bool:
    """Return whether Gloo has this reduction. Complex numbers are passed as pairs of reals, which have no product."""
    return not dtype.is_complex or _OP[redop] != dist.ReduceOp.PRODUCT


def summand(tensor: Tensor, redop: int, *, is_scratch: bool = False) -> Tensor:
    """Return the elements of a dense `tensor` in a type that Gloo reduces, as a copy unless `is_scratch`."""
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.uint64:
        signed = flat.view(torch.int64)
        return signed ^ _SIGN if _OP[redop] in _ORDERED else signed.to(torch.int64, copy=not is_scratch)
    if tensor.is_complex():
        real = torch.view_as_real(flat).reshape(-1)
        return real.to(real.dtype, copy=not is_scratch)
    if tensor.dtype == torch.bool:
        return flat.to(torch.uint8)
    wider = torch.int64 if redop == AVG and not tensor.is_floating_point() else _WIDER.get(tensor.dtype, tensor.dtype)
    return flat.to(wider, copy=not is_scratch)


def result_of(work: Tensor, like: Tensor, redop: int, world_size: int) -> Tensor:
    """Convert a reduction of `summand`s to a tensor like `like`, divided for AVG."""
    if like.is_complex():
        work = torch.view_as_complex(work.reshape(-1, 2))
    elif like.dtype == torch.uint64:
        work = (work ^ _SIGN if _OP[redop] in _ORDERED else work).view(torch.uint64)
    divide(work, redop, world_size)
    return work.to(like.dtype).view(like.shape)
