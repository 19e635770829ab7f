"""Add gradients in place, dense or sparse, as autograd accumulates them."""

from __future__ import annotations

from torch import Tensor


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum in the memory of one operand; None counts as zero. The sum is dense if either of them is."""
    if total is None or grad is None:
        return grad if total is None else total
    return grad.add_(total) if total.is_sparse and not grad.is_sparse else total.add_(grad)


def address_of(grad: Tensor) -> int:
    """Return the address of a gradient's values."""
    return (grad._values() if grad.is_sparse else grad).data_ptr()
