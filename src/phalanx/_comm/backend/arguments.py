"""Check the arguments that c10d passes to a process group, before anything is sent to another rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx._base.dtypes import REDUCTIONS, can_reduce, dtype_of, reduction_name
from phalanx._comm.backend.device_backends import no_backend_for
from phalanx._comm.backend.memoryless import address_of, check_memory
from phalanx._comm.transport.overlaps import extent_of, extents_overlap, find_shared

_SUM = REDUCTIONS[ReduceOp.SUM]
_PREMUL = int(cast(Any, ReduceOp.PREMUL_SUM))
_CODES = {int(cast(Any, kind)): code for kind, code in REDUCTIONS.items()} | {_PREMUL: _SUM}
_UNSET = timedelta(0)


class ArgumentError(ValueError, RuntimeError):
    """An `ArgumentError` reports an argument that is wrong whatever the other ranks do.

    It is also a RuntimeError, which torch's own groups raise; its message contains the text of torch's error.
    """


def timeout_of(options: Any, default_s: float) -> float:
    """Return the seconds of `options.timeout`, or `default_s` if the timeout is None or not above zero."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    if timeout is None or timeout <= _UNSET:
        return default_s
    return timeout.total_seconds()


def reduction_of(op: Any, dtype: torch.dtype, operation: str) -> tuple[int, Any]:
    """Return the core's code of the reduction `op`, and the factor of PREMUL_SUM (else None).

    Raises:
        ValueError: `op` is not a supported reduction, or is not defined for `dtype`.
    """
    kind = getattr(op, "op", op)  # a ReduceOp holds its type in `op`
    # comparing the enum itself costs 2 us
    number = int(cast(Any, kind)) if isinstance(kind, ReduceOp.RedOpType) else -1
    code = _CODES.get(number, -1)
    if code < 0:
        known = ", ".join(r.name for r in REDUCTIONS)
        raise ArgumentError(f"{operation}: unknown reduction {op!r}; use {known} or PREMUL_SUM")
    factor = op.factor if number == _PREMUL else None
    row = dtype_of(dtype)
    if factor is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{operation}: PREMUL_SUM is not defined for {row.name} tensors")
    if not can_reduce(dtype, code):
        raise ArgumentError(f"{operation}: {reduction_name(code)} is not defined for {row.name} tensors")
    return code, factor


class _AllowedDevice(threading.local):
    """An `_AllowedDevice` holds the device, besides the CPU, whose tensors this thread's calls accept."""

    device: torch.device | None = None


_allowed = _AllowedDevice()


@contextlib.contextmanager
def device_allowed(device: torch.device) -> Iterator[None]:
    """Accept tensors on `device` in this thread's calls inside the block."""
    _allowed.device = device
    try:
        yield
    finally:
        _allowed.device = None


def check_tensor(tensor: Any, operation: str, *, written: bool = False) -> Tensor:
    """Return `tensor`; raise unless it is dense, and on a supported device. If `written`, the call writes to it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu and tensor.device != _allowed.device:
        raise ArgumentError(no_backend_for(tensor.device, operation))
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"{operation}: unsupported layout: the tensor is {tensor.layout}; only all_reduce takes sparse tensors"
        )
    if not address_of(tensor):
        check_memory(tensor, operation, written=written)
    if written and not tensor.is_contiguous() and 0 in tensor.stride() and _overlaps_itself(tensor):
        raise ArgumentError(
            f"{operation}: elements of the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} share "
            "memory, so no result can be written to it.\nPass tensor.clone()."
        )
    return tensor


def _overlaps_itself(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def one(
    tensors: Any, operation: str, *, words: str = "requires a single-element tensor list", written: bool = False
) -> Tensor:
    """Return the single tensor of a list; `words` is torch's error text for another number of tensors."""
    if isinstance(tensors, Tensor):
        return check_tensor(tensors, operation, written=written)
    if len(tensors) != 1:
        raise ArgumentError(f"{operation}: {words}, got {len(tensors)} tensors")
    return check_tensor(tensors[0], operation, written=written)


def check_alike(tensors: Sequence[Any], operation: str, *, written: bool = False) -> list[Tensor]:
    """Check several tensors that one call treats as one: they must have the same dtype and shape."""
    checked = [check_tensor(t, operation, written=written) for t in tensors]
    for i, tensor in enumerate(checked if len(checked) > 1 else ()):
        _check_dtype(operation, i, f"tensor {i}", tensor, checked[0], "tensor 0")
        if tensor.shape != checked[0].shape:
            raise ArgumentError(
                f"{operation}: invalid tensor size at index {i}: tensor {i} has the shape {tuple(tensor.shape)}, "
                f"tensor 0 {tuple(checked[0].shape)}"
            )
    return checked


def check_one_type(tensors: Sequence[Any], operation: str) -> list[Tensor]:
    """Check that output tensors have the same layout and dtype, as torch's backends require; shapes may differ."""
    for at, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and tensor.layout != tensors[0].layout:
            raise _layouts_differ(operation, at, tensors)
    checked = [check_tensor(t, operation, written=True) for t in tensors]
    for at, tensor in enumerate(checked):
        if tensor.dtype != checked[0].dtype:
            raise ArgumentError(
                f"{operation}: tensors must all have the same type: tensor {at} is {tensor.dtype}, tensor 0 is "
                f"{checked[0].dtype}"
            )
    return checked


def _layouts_differ(operation: str, at: int, tensors: Sequence[Tensor]) -> ArgumentError:
    return ArgumentError(
        f"{operation}: invalid tensor layout at index {at}: tensor {at} is {tensors[at].layout}, tensor 0 is "
        f"{tensors[0].layout}"
    )


def _check_dtype(operation: str, at: int, name: str, tensor: Tensor, like: Tensor, likes: str) -> None:
    if tensor.dtype != like.dtype:
        raise ArgumentError(
            f"{operation}: invalid tensor type at index {at}: {name} is {tensor.dtype}, {likes} is {like.dtype}"
        )


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
    """Check that there is one tensor per rank, with the dtype of `like` and, unless `uneven`, its element count."""
    if len(tensors) != world_size:
        raise ArgumentError(_wrong_length(operation, "output" if written else "input", name, len(tensors), world_size))
    checked = [check_tensor(t, operation, written=written) for t in tensors]
    for r, t in enumerate(checked):
        _check_dtype(operation, r, f"{name}[{r}]", t, like, "the tensor")
        if not uneven and t.numel() != like.numel():
            words = "invalid size of output tensor" if operation.endswith("_coalesced") else "invalid tensor size"
            raise ArgumentError(
                f"{operation}: {words} at index {r}: {name}[{r}] has {t.numel()} elements, the tensor of shape "
                f"{tuple(like.shape)} has {like.numel()}"
            )
    return checked


def check_apart(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], operation: str, name: str, *, suffix: str = ""
) -> bool:
    """Return whether no input or output of a call can overlap an output; otherwise the caller must copy the inputs.

    Refuse outputs that share memory, because their final values would depend on the order of arrival.

    Cost: sorts one address per tensor. Compares single elements only if the address ranges of two outputs overlap.
    """
    written = [extent_of(tensor) for tensor in outputs]
    if not extents_overlap([extent_of(tensor) for tensor in inputs], written):
        return True
    if extents_overlap([], written) and (shared := find_shared(outputs)) is not None:
        one, other = (f"{name}[{at}]{suffix}" for at in sorted(shared))
        raise ArgumentError(
            f"{operation}: {one} and {other} share memory, so they cannot hold two results.\n"
            "Pass a separate tensor for each rank; `[tensor] * n` repeats one tensor n times."
        )
    return False


def _wrong_length(operation: str, side: str, name: str, found: int, world_size: int) -> str:
    if operation in ("gather", "scatter"):
        return (
            f"{operation}: Incorrect {side} list size {found}. {side.capitalize()} list size should be {world_size}: "
            f"{name} needs one tensor per rank"
        )
    return f"{operation}: invalid {side} tensor list: {name} holds {found} tensors, the group has {world_size} ranks"


def is_sparse(tensor: Any) -> bool:
    """Return whether `tensor` is a sparse COO tensor, which only all_reduce supports."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo


def check_sparse(tensors: Sequence[Tensor], op: Any) -> None:
    """Refuse all calls but a sum of sparse CPU tensors with the same dtype and shape.

    Other reductions are not defined for missing entries.
    """
    if getattr(op, "op", op) != ReduceOp.SUM:
        raise ArgumentError(
            f"all_reduce: unsupported reduction operation: sparse tensors can only be summed, not reduced with {op}"
        )
    for at, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise ArgumentError(no_backend_for(tensor.device, "all_reduce"))
        if tensor.layout != tensors[0].layout:
            raise _layouts_differ("all_reduce", at, tensors)
        _check_dtype("all_reduce", at, f"tensor {at}", tensor, tensors[0], "tensor 0")
        if tensor.shape != tensors[0].shape:
            raise ArgumentError(
                f"all_reduce: invalid tensor size at index {at}: tensor {at} has the shape {tuple(tensor.shape)}, "
                f"tensor 0 {tuple(tensors[0].shape)}"
            )


def check_parts(whole: Tensor, part: Tensor, world_size: int, operation: str, names: tuple[str, str]) -> None:
    """Check that `whole` has the dtype of `part`, and `world_size` times as many elements."""
    if whole.dtype != part.dtype:
        raise ArgumentError(
            f"{operation}: invalid tensor type: {names[0]} is {whole.dtype}, {names[1]} is {part.dtype}"
        )
    if whole.numel() != part.numel() * world_size:
        raise ArgumentError(
            f"{operation}: invalid tensor size: {names[0]} has {whole.numel()} elements, but {world_size} ranks with "
            f"{part.numel()} elements each ({names[1]}) need {part.numel() * world_size}"
        )


def check_rank(rank: int, world_size: int, operation: str, name: str) -> int:
    """Return `rank`; raise an ArgumentError unless it is a rank of the group."""
    if not 0 <= rank < world_size:
        raise ArgumentError(f"{operation}: {name} is {rank}, the group has ranks 0 to {world_size - 1}")
    return rank


def check_root(options: Any, world_size: int, operation: str, name: str, num_tensors: int | None = None) -> int:
    """Return the root rank of a call; with `num_tensors`, check also that `options.rootTensor` is one of them."""
    root: int = options.rootRank
    if not 0 <= root < world_size:
        raise ArgumentError(
            f"{operation}: invalid root rank: {name} is {root}, the group has ranks 0 to {world_size - 1}"
        )
    if num_tensors is not None and not 0 <= options.rootTensor < num_tensors:
        raise ArgumentError(
            f"{operation}: invalid root tensor: rootTensor is {options.rootTensor}, the call has {num_tensors} tensors"
        )
    return root


def split_rows(tensor: Tensor, sizes: Sequence[int], world_size: int, operation: str, name: str) -> list[Tensor]:
    """Return one view of `tensor` per rank along its first dimension: of `sizes` rows, or equal parts without sizes.

    Raises:
        ValueError: the sizes do not fit the tensor, or there is not one for each rank.
    """
    if tensor.dim() == 0:
        raise ArgumentError(f"{operation}: {name} has no dimension to split along")
    rows = tensor.shape[0]
    if not sizes:
        if rows % world_size:
            raise ArgumentError(
                f"{operation}: {name} has {rows} rows, which cannot be split equally over {world_size} ranks"
            )
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size:
        raise ArgumentError(f"{operation}: {len(sizes)} split sizes for {name}, the group has {world_size} ranks")
    if sum(sizes) != rows or min(sizes) < 0:
        raise ArgumentError(f"{operation}: split sizes {list(sizes)} do not fit {name}, which has {rows} rows")
    return list(torch.split(tensor, list(sizes)))
