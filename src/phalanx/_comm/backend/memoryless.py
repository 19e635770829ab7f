"""Handle tensors without memory: skip calls with fake tensors, read zero tensors as zeros, and refuse the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from phalanx._base.torch_names import find
from phalanx._comm.backend.work import CompletedWork
from phalanx._comm.transport.tensors import is_zero_tensor

_WHY = "errors about tensors without memory are less specific"
_PLAIN_DISPATCH: Any = find("torch._C._disabled_torch_dispatch_impl", loses=_WHY, instead=None)
_is_wrapped: Any = find("torch._C._functorch.is_functorch_wrapped_tensor", loses=_WHY, instead=lambda tensor: False)


class FakeCall(Exception):
    """An argument is a fake tensor, which has no values, so the call does nothing, as in torch's backends."""


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor belongs to a FakeTensorMode, which traces programs without running them."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # if it was not imported, there are no fake tensors
    return module is not None and isinstance(tensor, module.FakeTensor)


def address_of(tensor: Tensor) -> int:
    """Return the address of the tensor's elements; 0 if they have none."""
    if is_fake(tensor):  # a fake tensor would warn
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # for tensors inside vmap, and other placeholders
        return 0


def check_memory(tensor: Tensor, operation: str, *, written: bool) -> None:
    """Check that a tensor with address 0 is acceptable: empty, or a zero tensor of autograd that is only read.

    Raises:
        FakeCall: the tensor is fake.
        TypeError: the tensor wraps other tensors, or is a placeholder.
        ValueError: the tensor cannot be written, or its memory was freed.
    """
    if is_fake(tensor):
        raise FakeCall
    kind = type(tensor).__name__
    if kind == "DTensor":
        raise TypeError(
            f"{operation}: the tensor is a DTensor, of which each rank holds a shard.\n"
            "Pass this rank's shard, tensor.to_local(), or let DTensor communicate: tensor.redistribute(...)."
        )
    if is_zero_tensor(tensor):
        if not written:
            return
        raise ValueError(
            f"{operation}: the tensor represents zeros without memory (autograd creates such tensors) and cannot "
            "be written to.\nPass tensor.clone()."
        )
    if not tensor.numel():
        return
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    if type(tensor) is not Tensor and dispatch is not _PLAIN_DISPATCH:
        raise TypeError(
            f"{operation}: the tensor is a {kind}, a subclass without memory of its own.\n"
            "Pass the tensors that it wraps."
        )
    if _is_wrapped(tensor):
        raise TypeError(
            f"{operation}: the tensor is a wrapper of torch.func (vmap, grad), which has no values yet.\n"
            "Call collectives outside the transformed function."
        )
    raise ValueError(
        f"{operation}: the tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed, as FSDP does "
        "between uses.\nRestore the storage before the call."
    )


def work_of_fake_call(operation: str, arguments: tuple[Any, ...]) -> CompletedWork:
    """Return the work of a call whose tensors are all fake."""
    tensors = list(_tensors_in(arguments))
    if not all(map(is_fake, tensors)):
        raise TypeError(f"{operation}: some tensors of the call are fake (FakeTensorMode) and some are real")
    return CompletedWork(list(_tensors_in(arguments[:1])))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
