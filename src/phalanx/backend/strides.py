"""How a tensor's elements lie in memory, asked without the C core."""

from __future__ import annotations

from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the strides visit each element of one block exactly once, in some order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of one shape have the same element at the same place; a dimension of 1 has no say."""
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size != 1)
