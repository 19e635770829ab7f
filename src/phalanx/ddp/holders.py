"""Find out whether anyone else holds a gradient's memory, by the reference counts that Python and torch keep.

    p.grad ---> tensor ---> storage <--- tensor <--- autograd, where the gradient of `h + p.unsqueeze(0)` flows on to h
                  ^                        ^
                a hook                   a view of the user's

AccumulateGrad takes a tensor over as `.grad` when nobody else holds that tensor; it does not ask who else has its
*storage*. So memory is ours to write only where all three are counted: the tensor's object in Python, the tensor, and
the storage. A count says how many there are, not who they are; so it is taken where those that must be there are known,
and compared with the same count of a tensor that certainly nobody else has. Python's and torch's ways of counting each
other's references differ between versions: the sample is counted by the same code.

Counts are exact when nothing of the gradient is on its way any more: not inside the hook that autograd calls for it,
where the engine's own reference is still alive, and hooks that come after may keep another, but from the next gradient
on. New references can then come about through `.grad` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from phalanx._base.torch_names import find

_LOSES = "phalanx.DistributedDataParallel does not know who holds a gradient"
_use_count: Any = find("torch.Tensor._use_count", loses=_LOSES)  # torch.utils.swap_tensors asks for it as well
_storage_use_count: Any = find("torch._C._storage_Use_Count", loses=_LOSES)


def storage_holders(tensor: Tensor) -> int:
    """Return how many tensors, and other holders, the storage of `tensor` has."""
    count: int = _storage_use_count(tensor.untyped_storage()._cdata)
    return count


def view_holders(views: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return how many references hold each of `views`; the number stays the same as long as none comes or goes."""
    return list(zip(map(getrefcount, views), map(_use_count, views), strict=True))


def is_alone(parameter: Tensor) -> bool:
    """Return whether only `parameter.grad` leads to its memory. The caller holds no reference."""
    return _count(parameter) == _count_of_one_alone()


def separate_gradient(parameter: Tensor) -> None:
    """Copy `parameter.grad` if another tensor, too, leads to its memory."""
    grad = parameter.grad
    if grad is not None and not grad.is_sparse and storage_holders(grad) > _count_of_one_alone()[2]:
        parameter.grad = grad.clone()


def _count(parameter: Tensor) -> tuple[int, int, int]:
    grad = parameter.grad
    assert grad is not None  # the caller has asked
    return getrefcount(grad), _use_count(grad), storage_holders(grad)


@functools.cache
def _count_of_one_alone() -> tuple[int, int, int]:
    sample = torch.zeros(1, requires_grad=True)
    sample.grad = torch.zeros(1)
    return _count(sample)
