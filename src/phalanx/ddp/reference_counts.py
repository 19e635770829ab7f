"""Determine from the reference counts of Python and torch whether a gradient's memory has other users.

    p.grad ---> tensor ---> storage <--- tensor <--- autograd, where the gradient of `h + p.unsqueeze(0)` flows on to h
                  ^                        ^
                a hook                   a view of the user's

AccumulateGrad uses a tensor as `.grad` if nothing else refers to that tensor; it does not check who else uses its
*storage*. So we may write to the memory only after checking three counts: of the tensor's Python object, of the tensor,
and of the storage. A count is the number of references, and does not tell their owners; so it is taken where the
expected references are known, and compared with the same count of a sample tensor without other users. How Python and
torch count each other's references differs between versions, so the same code counts the sample.

Counts are exact once autograd has finished with the gradient: not inside the gradient's own hook, where the engine's
reference is still alive and later hooks may keep another, but from the next gradient on. After that, new references can
be created only through `.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from phalanx._base.torch_names import find

_LOSES = "phalanx.DistributedDataParallel cannot detect other references to a gradient"
_use_count: Any = find("torch.Tensor._use_count", loses=_LOSES)  # torch.utils.swap_tensors uses it, too
_storage_use_count: Any = find("torch._C._storage_Use_Count", loses=_LOSES)


def storage_use_count(tensor: Tensor) -> int:
    """Return how many tensors and other owners refer to the storage of `tensor`."""
    count: int = _storage_use_count(tensor.untyped_storage()._cdata)
    return count


def reference_counts(views: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the reference counts of each of `views`, which change when a reference is added or dropped."""
    return list(zip(map(getrefcount, views), map(_use_count, views), strict=True))


def is_unshared(parameter: Tensor) -> bool:
    """Return whether only `parameter.grad` refers to its memory. The caller must hold no reference to the gradient."""
    return _count(parameter) == _unshared_count()


def separate_gradient(parameter: Tensor) -> None:
    """Copy `parameter.grad` if another tensor shares its memory."""
    grad = parameter.grad
    if grad is not None and not grad.is_sparse and storage_use_count(grad) > _unshared_count()[2]:
        parameter.grad = grad.clone()


def _count(parameter: Tensor) -> tuple[int, int, int]:
    grad = parameter.grad
    assert grad is not None  # the caller has checked it
    return getrefcount(grad), _use_count(grad), storage_use_count(grad)


@functools.cache
def _unshared_count() -> tuple[int, int, int]:
    sample = torch.zeros(1, requires_grad=True, device="cpu")
    sample.grad = torch.zeros(1, device="cpu")
    return _count(sample)
