"""Map each element type and each reduction between PyTorch, the C core and our messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

from phalanx._base.core_numbers import (
    AVG,
    BAND,
    BOR,
    BXOR,
    BYTES,
    DTYPE_NAMES,
    DTYPE_NUMBERS,
    MAX,
    MIN,
    PRODUCT,
    REDUCTION_NAMES,
    SUM,
)


@dataclass(frozen=True)
class DType:
    """A `DType` is an element type: its number in the core, its size in bytes, and its name."""

    code: int
    size: int
    name: str


_REDUCIBLE = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES: Mapping[torch.dtype, DType] = {
    dtype: DType(DTYPE_NUMBERS[_name(dtype)], dtype.itemsize, _name(dtype)) for dtype in _REDUCIBLE
}

# The core's numbers of the real types, whose tensors are never conjugate views, though they may be negative views.
REAL_CODES: Mapping[torch.dtype, int] = {d: row.code for d, row in DTYPES.items() if not d.is_complex}

REDUCTIONS: Mapping[ReduceOp.RedOpType, int] = {
    ReduceOp.SUM: SUM,
    ReduceOp.AVG: AVG,
    ReduceOp.PRODUCT: PRODUCT,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
    ReduceOp.BAND: BAND,
    ReduceOp.BOR: BOR,
    ReduceOp.BXOR: BXOR,
}

_BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
# Bitwise reductions of floats are meaningless, complex numbers have no order, a bool has no mean.
_LACKS = {
    torch.bool: {ReduceOp.AVG},
    **{dtype: _BITWISE for dtype in DTYPES if dtype.is_floating_point},
    **{dtype: {*_BITWISE, ReduceOp.MIN, ReduceOp.MAX} for dtype in DTYPES if dtype.is_complex},
}
_REDUCED = frozenset((d, code) for d in DTYPES for op, code in REDUCTIONS.items() if op not in _LACKS.get(d, ()))


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the `DType` of `dtype`; a type that is not in `DTYPES` is moved as bytes and cannot be reduced."""
    row = DTYPES.get(dtype)
    return row if row is not None else DType(BYTES, dtype.itemsize, _name(dtype))


def dtype_name(code: int) -> str:
    """Return torch's name of the element type with this number."""
    return DTYPE_NAMES.get(code, f"dtype {code}")


def reduction_name(code: int) -> str:
    """Return torch's name of the reduction with this number."""
    return REDUCTION_NAMES.get(code, f"reduction {code}")


def can_reduce(dtype: torch.dtype, redop: int) -> bool:
    """Return whether the reduction with number `redop` works for tensors of `dtype`."""
    return (dtype, redop) in _REDUCED
