"""A `ParameterShard` is the slice of one parameter that a rank updates, as a parameter for an optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.optim.plan import Slice


class ParameterShard:
    """A `ParameterShard` is a slice of `parameter`, whose elements in memory order are `flat`.

    `tensor` is the optimizer's parameter: the parameter itself if the slice is all of it, else a one-dimensional view.
    """

    def __init__(self, parameter: Tensor, flat: Tensor, part: Slice) -> None:
        self.parameter = parameter
        self.part = part
        self._rearranged: Tensor | None = None
        self.is_whole = part.stop - part.start == parameter.numel()
        self.tensor = parameter
        if not self.is_whole:
            self.tensor = flat[part.start : part.stop]
            self.tensor.requires_grad_(flat.is_floating_point() or flat.is_complex())

    def acquire_gradient(self) -> None:
        """Set this slice of the gradient as `tensor.grad`; copy it only if its strides are not the parameter's.

        Raises:
            RuntimeError: the gradient is sparse and cannot be cut.
        """
        if self.is_whole:
            return
        grad = self.parameter.grad
        if grad is None:
            self.tensor.grad = None
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer: a parameter of shape {tuple(grad.shape)} has a sparse gradient, but is cut "
                "between ranks. Make the gradient dense (sparse=False), or use an optimizer that updates whole "
                "parameters, such as SparseAdam."
            )
        flat = in_memory_order(grad, self.parameter)
        self.tensor.grad = flat[self.part.start : self.part.stop]
        if flat.data_ptr() != grad.data_ptr():
            self._rearranged = flat.as_strided(self.parameter.shape, self.parameter.stride())

    def write_gradient(self) -> None:
        """Copy the changed slice back into the parameter's gradient, unless the slice is a view of it."""
        if self._rearranged is not None and self.parameter.grad is not None:
            self.parameter.grad.detach().copy_(self._rearranged)

    def release_gradient(self) -> None:
        """Release the slice of the gradient, so that zero_grad frees its memory."""
        self._rearranged = None
        if not self.is_whole:
            self.tensor.grad = None


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` in the memory order of `like`, a dense tensor; a view if possible."""
    tensor = tensor.detach()
    if tensor.stride() != like.stride():
        strided = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = strided.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
