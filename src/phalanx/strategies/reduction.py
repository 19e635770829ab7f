"""Reduce or gather the values of all replicas."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.torch_names import find

tree_flatten: Any = find("torch.utils._pytree.tree_flatten", loses="strategies do not reduce nested values")
tree_unflatten: Any = find("torch.utils._pytree.tree_unflatten", loses="strategies do not reduce nested values")

Reduce = str | dist.ReduceOp | dist.ReduceOp.RedOpType


def is_mean(reduce_op: Reduce) -> bool:
    """Return whether `reduce_op` is the mean, and not the sum.

    Raises:
        ValueError: `reduce_op` is neither.
    """
    word = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    if word in ("mean", "avg", dist.ReduceOp.AVG):
        return True
    if word in ("sum", dist.ReduceOp.SUM):
        return False
    raise ValueError(f"reduce: reduce_op must be 'sum' or 'mean', got {reduce_op!r}")


def reduce_over(
    group: dist.ProcessGroup | None, reduce_op: Reduce, value: Any, axis: int | tuple[int, ...] | None
) -> Any:
    """Reduce `value`, or each of its leaves. All ranks of `group` call it; `group` is None for a single replica.

    Raises:
        TypeError: a leaf is not a number.
        ValueError: a leaf has no such axis; nothing was sent.
    """
    mean = is_mean(reduce_op)
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    leaves, shape = tree_flatten(value)
    tensors = [_numbers(leaf) for leaf in leaves]
    for tensor in tensors:
        for one in axes:
            _check_axis("reduce", tensor, one)
    reduced = [_reduce(group, tensor, mean, axes) for tensor in tensors]
    results = [
        _as_given(one, leaf) if isinstance(leaf, Tensor) else one.item() if one.dim() == 0 else one
        for one, leaf in zip(reduced, leaves, strict=True)
    ]
    return tree_unflatten(results, shape)


def _as_given(result: Tensor, leaf: Tensor) -> Tensor:
    """Return the mean of integers in the default dtype, as torch.mean would if it accepted integers."""
    is_real = leaf.is_floating_point() or leaf.is_complex() or not result.is_floating_point()
    return result if is_real else result.to(torch.get_default_dtype())


def _numbers(value: Any) -> Tensor:
    """Return `value` as a tensor; booleans become integers, so that their sum counts the True values."""
    try:
        exact = torch.float64 if isinstance(value, float) else None
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=exact)
    except (TypeError, RuntimeError):
        raise TypeError(f"reduce: values must be tensors or numbers, got a {type(value).__name__}") from None
    return tensor.to(torch.int64) if tensor.dtype == torch.bool else tensor


def _check_axis(called: str, tensor: Tensor, axis: Any) -> None:
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"{called}: axis must be a number, got {axis!r}")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(f"{called}: a tensor of shape {tuple(tensor.shape)} has no axis {axis}")


def _reduce(group: dist.ProcessGroup | None, tensor: Tensor, mean: bool, axes: tuple[int, ...]) -> Tensor:
    count = torch.tensor(math.prod(tensor.shape[one] for one in axes), device="cpu")
    if mean and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float64)
    total = tensor.sum(axes) if axes else tensor.clone()
    total = total.contiguous()
    if group is not None:
        dist.all_reduce(total, group=group)
        if mean:
            count = count.to(total.device)
            dist.all_reduce(count, group=group)
    return total / count if mean else total


def gather_over(group: dist.ProcessGroup | None, value: Tensor, axis: int) -> Tensor:
    """Concatenate `value` of all replicas. All ranks of `group` call it.

    Raises:
        TypeError: `value` is not a tensor.
        ValueError: `value` has no such axis.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"gather: value must be a tensor, got a {type(value).__name__}")
    if value.dim() == 0:
        raise ValueError("gather: the tensor has no axes: pass value.reshape(1)")
    _check_axis("gather", value, axis)
    value = value.detach()
    if group is None:
        return value.clone()
    moved = value.movedim(axis, 0).contiguous()
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=value.device)
    sizes[dist.get_rank(group)] = moved.shape[0]
    dist.all_reduce(sizes, group=group)
    longest = int(sizes.max())
    padded = torch.zeros((longest, *moved.shape[1:]), dtype=moved.dtype, device=moved.device)
    padded[: moved.shape[0]] = moved
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]).movedim(0, axis)
