"""The order in which the elements of a tensor lie in memory, which layers behind a cut shall find as in one process.

Random numbers are drawn in this order, so that nn.Dropout of a transposed tensor drops other elements than that of a
contiguous copy. A tensor with gaps (a slice) or repetitions (an expanded one) goes without them, in the order that
`torch.empty_like` gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

Strides = tuple[int, ...]


def find_strides(tensor: Tensor) -> Strides | None:
    """Return the strides of `tensor` without gaps; None if they are those of a contiguous tensor."""
    strides, expected = tensor.stride(), 1
    for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
        if stride != expected:
            break
        expected *= size
    else:
        return None
    return torch.empty_like(tensor, device="meta").stride() if tensor.numel() else None


def flatten(tensor: Tensor, strides: Strides | None) -> Tensor:
    """Return the elements of `tensor` in the order of `strides`, which `find_strides` has found.

    Shape: (N,); that of `tensor` where there are no strides.
    Cost: one copy where `tensor` has gaps or repetitions, or must still be conjugated or negated.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def restore(flat: Tensor, shape: tuple[int, ...], strides: Strides | None) -> Tensor:
    """Return the tensor of which `flatten` has made `flat`, in the same memory; no view of it."""
    if strides is None:
        return flat
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)
