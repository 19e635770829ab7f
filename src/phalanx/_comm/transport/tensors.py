"""Query the memory layout of tensors, and copy tensors whose memory cannot be used directly."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from phalanx._base.torch_names import find

tree_map: Any = find("torch.utils._pytree.tree_map", loses="nested batches are not moved to a device")

is_zero_tensor: Any = find(
    "torch.Tensor._is_zerotensor",
    loses="zero tensors that have no memory are not recognized",
    instead=lambda tensor: False,
)
"""Whether a tensor represents zeros without memory, as autograd creates them."""


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_all: Any = find("torch._foreach_copy_", loses="copies of many tensors take longer", instead=_copy_each)
"""A function that copies each tensor of the second list to the tensor at the same index of the first list."""


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to `device`, in nested mappings, sequences and classes known to pytree.

    Subclasses of dict and list, and other mutable mappings, are copied with `copy.copy`. Other objects are moved with
    their own method `to`, if they have one, as torch_geometric's Data does. Anything else is returned as it is.
    """

    def move(value: Any) -> Any:
        if isinstance(value, (Tensor, PackedSequence)):
            return value.to(device, non_blocking=True)  # type: ignore[arg-type]
        if isinstance(value, MutableMapping):
            value = copy.copy(value)
            for key, one in value.items():
                value[key] = move_batch(one, device)
        elif isinstance(value, list):
            value = copy.copy(value)
            value[:] = [move_batch(one, device) for one in value]
        elif callable(own := getattr(value, "to", None)):
            value = own(device)
        return value

    return tree_map(move, batch, is_leaf=lambda value: isinstance(value, PackedSequence))


def alias(tensor: Tensor) -> Tensor:
    """Return a detached tensor that shares the memory of `tensor`, and that any thread may write to.

    Inference tensors can only be written in inference mode, which is thread-local, but a collective may not run on its
    caller's thread.
    """
    if not tensor.is_inference() or is_zero_tensor(tensor) or tensor.is_neg() or tensor.is_conj():
        return tensor.detach()
    with torch.inference_mode(False):
        same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return same.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is contiguous, has memory, and is neither lazily conjugated nor negated."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and not is_zero_tensor(tensor)


def dense(tensor: Tensor) -> Tensor:
    """Return `tensor` itself if it is plain; else a plain copy."""
    if is_plain(tensor):
        return tensor
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """Return `tensor` itself if `factor` is None; otherwise their product, in the dtype of `tensor`."""
    if factor is None:
        return tensor
    with torch.no_grad():
        product: Tensor = (tensor * factor).to(tensor.dtype)
        return product


def write_back(tensor: Tensor, data: Tensor) -> None:
    """Copy `data` into a tensor whose own memory could not be used; do nothing if `data` is the tensor."""
    if data is tensor:
        return
    # Inference mode is thread-local, and this may not be the caller's thread.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(data)


def write_all_back(tensors: Sequence[Tensor], data: Sequence[Tensor]) -> None:
    """Call `write_back` for each tensor with the data at its index."""
    for tensor, got in zip(tensors, data, strict=True):
        write_back(tensor, got)


def nbytes(tensor: Tensor) -> int:
    """Return the number of bytes of the elements."""
    return tensor.numel() * tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as one dimension with stride 1; `view(-1)` of one element may keep another stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy in the tensor's memory order. Ranks must agree on these.

    They are the tensor's own strides if it is dense, else a contiguous tensor's. A dimension of size 1 has stride 1.
    """
    if tensor.layout is not torch.strided:
        return ()
    like = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
    return tuple(stride if size != 1 else 1 for size, stride in zip(like.shape, like.stride(), strict=True))


def same_order(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors of one shape have their elements in the same order in memory."""
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size != 1)
