"""Values of all replicas made one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

Reduce = str | dist.ReduceOp | dist.ReduceOp.RedOpType


def is_mean(reduce_op: Reduce) -> bool:
    """Whether it is the mean; else it is the sum.

    Raises:
        ValueError: it is neither.
    """
    word = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    if word in ("mean", "avg", dist.ReduceOp.AVG):
        return True
    if word in ("sum", dist.ReduceOp.SUM):
        return False
    raise ValueError(f"reduce: reduce_op must be 'sum' or 'mean', got {reduce_op!r}")


def reduce_over(group: dist.ProcessGroup | None, reduce_op: Reduce, value: Any, axis: int | None) -> Any:
    """Reduce `value`, or each leaf of it. Collective over `group`; None is one replica."""
    mean = is_mean(reduce_op)
    leaves, shape = pytree.tree_flatten(value)
    return pytree.tree_unflatten([_reduce(group, leaf, mean, axis) for leaf in leaves], shape)


def _reduce(group: dist.ProcessGroup | None, value: Any, mean: bool, axis: int | None) -> Any:
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    count = torch.ones((), dtype=torch.int64) if axis is None else torch.tensor(tensor.shape[axis])
    if mean and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    total = tensor.clone() if axis is None else tensor.sum(axis)
    total = total.contiguous()
    if group is not None:
        dist.all_reduce(total, group=group)
        if mean:
            count = count.to(total.device)
            dist.all_reduce(count, group=group)
    result = total / count if mean else total
    return result if isinstance(value, Tensor) else result.item()


def gather_over(group: dist.ProcessGroup | None, value: Tensor, axis: int) -> Tensor:
    """Concatenate `value` of all replicas. Collective over `group`.

    Raises:
        ValueError: it has no axis.
    """
    if value.dim() == 0:
        raise ValueError("gather: a tensor without axes: give it one with value.reshape(1)")
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
