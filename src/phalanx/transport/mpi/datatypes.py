"""Map our element types and reductions to MPI's. MPI has no half types: their sums travel as float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.dtypes import REDUCTIONS

_DATATYPES: Mapping[torch.dtype, str] = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
# AVG is a sum that is divided once, at the end.
_OPERATIONS: Mapping[int, str] = {
    REDUCTIONS[kind]: name
    for kind, name in {
        ReduceOp.SUM: "SUM",
        ReduceOp.AVG: "SUM",
        ReduceOp.PRODUCT: "PROD",
        ReduceOp.MIN: "MIN",
        ReduceOp.MAX: "MAX",
        ReduceOp.BAND: "BAND",
        ReduceOp.BOR: "BOR",
        ReduceOp.BXOR: "BXOR",
    }.items()
}
# A bool is a byte that is 0 or 1.
_OF_BOOL: Mapping[str, str] = {"SUM": "BOR", "PROD": "BAND", "MIN": "BAND", "MAX": "BOR"}
_BY_SIZE: Mapping[int, str] = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}


def summand(tensor: Tensor) -> Tensor:
    """Return `tensor` in a type that MPI reduces: half types become float32 (a copy), bools bytes (in place)."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def datatype_of(mpi: Any, dtype: torch.dtype) -> Any:
    """Return MPI's type for a type that it can reduce."""
    return getattr(mpi, _DATATYPES[dtype])


def operation_of(mpi: Any, redop: int, dtype: torch.dtype) -> Any:
    """Return MPI's reduction with this number in `phalanx.dtypes`, for tensors that were of `dtype`."""
    name = _OPERATIONS[redop]
    return getattr(mpi, _OF_BOOL.get(name, name) if dtype == torch.bool else name)


def element_of(mpi: Any, dtype: torch.dtype) -> Any:
    """Return a type as large as `dtype`, for elements that only move: some MPIs' byte counts end at 2 GiB."""
    return getattr(mpi, _BY_SIZE[dtype.itemsize])
