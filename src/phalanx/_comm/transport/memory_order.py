"""Preserve the memory order of a tensor's elements when the tensor is sent or saved.

Random numbers are drawn in this order, so nn.Dropout does not drop the same elements of a transposed tensor and of its
contiguous copy. Optimizers with `fused=True` process a parameter and its state in this order, and ignore strides: the
moments of a parameter in channels_last must be in channels_last again after a load.

A tensor with gaps (a slice) or repetitions (an expanded one) is stored without them, in the order of
`torch.empty_like`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Strides = tuple[int, ...]


def find_strides(tensor: Tensor) -> Strides | None:
    """Return the strides that `tensor` has without gaps; None if it is contiguous or empty."""
    strides, expected = tensor.stride(), 1
    for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
        if stride != expected:
            break
        expected *= size
    else:
        return None
    return torch.empty_like(tensor, device="meta").stride() if tensor.numel() else None


def flatten(tensor: Tensor, strides: Strides | None) -> Tensor:
    """Return the elements of `tensor` in the order of `strides`, the result of `find_strides`.

    Shape: (N,); without strides, the shape of `tensor`.
    Cost: one copy if `tensor` has gaps or repetitions, or is lazily conjugated or negated.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def restore(flat: Tensor, shape: tuple[int, ...], strides: Strides | None) -> Tensor:
    """Invert `flatten`: return a tensor that shares the memory of `flat`, but is not a view of it for autograd."""
    if strides is None:
        return flat
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)


def lay_out(tensor: Tensor, strides: Strides | None) -> Tensor:
    """Return a tensor with the same elements and with `strides`, the result of `find_strides`.

    Cost: one copy, unless `tensor` already has these strides.
    """
    wanted = torch.empty(tensor.shape, device="meta").stride() if strides is None else strides
    if tensor.stride() == wanted:
        return tensor
    return torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
