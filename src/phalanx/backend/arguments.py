"""What c10d hands to a process group, checked at the door: nothing here has reached another rank yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.backend.device_backends import no_backend_for
from phalanx.backend.memoryless import address_of, check_memory
from phalanx.dtypes import REDUCTIONS, can_reduce, dtype_of, reduction_name

_SUM = REDUCTIONS[ReduceOp.SUM]
_PREMUL = int(cast(Any, ReduceOp.PREMUL_SUM))
_CODES = {int(cast(Any, kind)): code for kind, code in REDUCTIONS.items()} | {_PREMUL: _SUM}
_UNSET = timedelta(0)


def timeout_of(options: Any, default_s: float) -> float:
    """Seconds of `options.timeout`; -1 ms there means that nobody set it."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    if timeout is None or timeout <= _UNSET:
        return default_s
    return timeout.total_seconds()


def reduction_of(op: Any, dtype: torch.dtype, operation: str) -> tuple[int, Any]:
    """The number of the reduction in the core, and the factor of PREMUL_SUM (else None).

    Raises:
        ValueError: there is no such reduction, or it has no meaning for `dtype`.
        TypeError: `op` is not a reduction.
    """
    kind = getattr(op, "op", op)  # a ReduceOp holds its type in `op`
    number = (
        int(cast(Any, kind)) if isinstance(kind, ReduceOp.RedOpType) else -1
    )  # comparing the enum itself costs 2 us
    code = _CODES.get(number, -1)
    if code < 0:
        known = ", ".join(r.name for r in REDUCTIONS)
        raise ValueError(f"{operation}: no reduction {op!r}; there are {known} and PREMUL_SUM")
    factor = op.factor if number == _PREMUL else None
    row = dtype_of(dtype)
    if factor is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{operation}: PREMUL_SUM is not defined for {row.name} tensors")
    if not can_reduce(dtype, code):
        raise ValueError(f"{operation}: {reduction_name(code)} is not defined for {row.name} tensors")
    return code, factor


def check_tensor(tensor: Any, operation: str, *, written: bool = False) -> Tensor:
    """A dense tensor on the CPU, or an error that says what it is instead. `written`: it receives the result."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise ValueError(no_backend_for(tensor.device, operation))
    if tensor.layout != torch.strided:
        raise ValueError(f"{operation}: the tensor is {tensor.layout}; only all_reduce takes sparse tensors")
    if not address_of(tensor):
        check_memory(tensor, operation, written=written)
    if written and not tensor.is_contiguous() and 0 in tensor.stride() and _overlaps_itself(tensor):
        raise ValueError(
            f"{operation}: elements of the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} share "
            "memory, so no result can be written to it.\nGive a clone() of it."
        )
    return tensor


def _overlaps_itself(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def one(tensors: Any, operation: str, *, written: bool = False) -> Tensor:
    """The single tensor of a list; several per call (one per device of a process) belong to torch's past."""
    if isinstance(tensors, Tensor):
        return check_tensor(tensors, operation, written=written)
    if len(tensors) != 1:
        raise ValueError(f"{operation}: expected one tensor per call, got {len(tensors)}")
    return check_tensor(tensors[0], operation, written=written)


def check_list(
    tensors: Sequence[Any],
    world_size: int,
    like: Tensor,
    operation: str,
    name: str,
    *,
    uneven: bool = False,
    written: bool = False,
) -> list[Tensor]:
    """One tensor per rank, of the dtype of `like` and, unless `uneven`, of its number of elements."""
    if len(tensors) != world_size:
        raise ValueError(f"{operation}: {name} holds {len(tensors)} tensors, the group has {world_size} ranks")
    checked = [check_tensor(t, operation, written=written) for t in tensors]
    for r, t in enumerate(checked):
        if t.dtype != like.dtype:
            raise ValueError(f"{operation}: {name}[{r}] is {t.dtype}, the tensor is {like.dtype}")
        if not uneven and t.numel() != like.numel():
            raise ValueError(
                f"{operation}: {name}[{r}] has {t.numel()} elements, the tensor of shape {tuple(like.shape)} has "
                f"{like.numel()}"
            )
    return checked


def check_sparse(tensor: Tensor, op: Any) -> None:
    """Only sums of CPU tensors: what else would the missing entries be?"""
    if getattr(op, "op", op) != ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse tensors can only be summed, not reduced with {op}")
    if tensor.device.type != "cpu":
        raise ValueError(no_backend_for(tensor.device, "all_reduce"))


def check_parts(whole: Tensor, part: Tensor, world_size: int, operation: str, names: tuple[str, str]) -> None:
    """`whole` holds `world_size` times what `part` holds, of the same dtype."""
    if whole.dtype != part.dtype:
        raise ValueError(f"{operation}: {names[0]} is {whole.dtype}, {names[1]} is {part.dtype}")
    if whole.numel() != part.numel() * world_size:
        raise ValueError(
            f"{operation}: {names[0]} has {whole.numel()} elements; for {world_size} ranks and {names[1]} of "
            f"{part.numel()} it must have {part.numel() * world_size}"
        )


def check_rank(rank: int, world_size: int, operation: str, name: str) -> int:
    """A rank of the group."""
    if not 0 <= rank < world_size:
        raise ValueError(f"{operation}: {name} is {rank}, the group has ranks 0 to {world_size - 1}")
    return rank


def split_rows(tensor: Tensor, sizes: Sequence[int], world_size: int, operation: str, name: str) -> list[Tensor]:
    """Views of `tensor` along its first dimension, one per rank: `sizes` rows each, or equal parts.

    Raises:
        ValueError: the sizes do not fit.
    """
    if tensor.dim() == 0:
        raise ValueError(f"{operation}: {name} has no dimension along which it could be split")
    rows = tensor.shape[0]
    if not sizes:
        if rows % world_size:
            raise ValueError(f"{operation}: {name} has {rows} rows, which {world_size} ranks cannot share equally")
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size:
        raise ValueError(f"{operation}: {len(sizes)} split sizes for {name}, the group has {world_size} ranks")
    if sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"{operation}: split sizes {list(sizes)} for {name}, which has {rows} rows")
    return list(torch.split(tensor, list(sizes)))
