"""One bucket's memory, and the views in it that serve as gradients.

buffer   |<- grad of w4 ->|gap|<- grad of b4 ->|gap|        one allocation; on backend `phalanx` in the arena
views     parameter.grad       parameter.grad               same memory, the parameter's shape and strides

A large gradient has a bucket to itself, and where ranks share memory autograd writes it there in the first place, into
a block of a pool. Then nothing is moved, and the bucket's own memory, reserved for what autograd wrote elsewhere, is
never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.sharing import shares_memory
from phalanx.backend.slices import NeededSlice, find_needed
from phalanx.backend.strides import is_dense, same_order
from phalanx.ddp.plan import Bucket

if TYPE_CHECKING:  # needs the C core, which may not be there
    from phalanx.backend.pool import SharedPool


def allocate(bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
    """Zeroed memory for a bucket; a collective where ranks share memory, and then all can reach it."""
    if bucket.device.type == "cpu" and shares_memory(group):
        from phalanx.backend import shared_empty  # needs the C core, which a group that shares memory has

        memory: Tensor = shared_empty(bucket.numel, dtype=bucket.dtype, group=group)
        # A single gradient leaves no gaps, and may never come here at all; what is not touched costs no memory.
        return memory.zero_() if len(bucket.slots) > 1 else memory
    return torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)


class DenseBucket:
    """A planned bucket with its memory. `parameters` are those of its slots, in the slots' order.

    With `as_view` a parameter's `.grad` becomes the view in the bucket; without it, gradients are copied in and out.
    `pool`, of `group`, is where autograd may have written the gradient of a bucket that has but one; with `as_view`
    only. Of such a gradient this rank may need the mean of a slice only.
    """

    def __init__(
        self,
        plan: Bucket,
        parameters: Sequence[Tensor],
        buffer: Tensor,
        *,
        as_view: bool,
        pool: SharedPool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        self.buffer = buffer
        self._as_view = as_view
        self._pool = pool if as_view and len(plan.slots) == 1 else None
        self._group = group
        self.needed: NeededSlice | None = None  # in this round; None for all of it
        self.in_place: Tensor | None = None  # this round's gradient, if the pool holds it
        self.views = [self._view(position) for position in range(len(plan.slots))]
        self._addresses = [buffer.data_ptr() + slot.offset * plan.dtype.itemsize for slot in plan.slots]

    def _view(self, position: int) -> Tensor:
        slot, parameter = self.plan.slots[position], self.parameters[position]
        if is_dense(parameter):  # autograd keeps a gradient in place only when its strides are the parameter's
            return self.buffer.as_strided(parameter.shape, parameter.stride(), slot.offset)
        return self.buffer[slot.offset : slot.offset + slot.numel].view(parameter.shape)

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Put `scale` times each parameter's gradient into its slot; zero where it has none.

        Where `.grad` is the slot already, nothing is moved. `written` says which gradients this backward wrote; one
        that it did not write is only read here, because it stays the user's when no other rank wrote it either.

        A gradient that autograd has just made is copied, once, and its memory given back. The other way, to zero the
        slot and let autograd add to it, touches each byte of the bucket three times instead of once.

        Raises:
            RuntimeError: a gradient does not fit: it is sparse, was built with create_graph=True, or the parameter
                changed its dtype, device or shape since it was wrapped.
        """
        self.in_place = self.needed = None
        if self._pool is not None and self._group is not None:
            self.needed = find_needed(self.parameters[0], self._group)
        slots, grads = [], []
        for position, parameter in enumerate(self.parameters):
            grad, view = parameter.grad, self.views[position]
            if grad is None:
                view.zero_()
                continue
            self._check(grad, position)
            if self._lies_in_pool(grad, parameter):
                self.in_place = grad
                continue
            moved = view.data_ptr() != self._addresses[position]  # module.to(...) swaps the memory under a gradient
            if grad is view and not moved:
                continue
            if moved:
                view = self.views[position] = self._view(position)
            slots.append(view)
            grads.append(grad)
            if self._as_view and written[position]:  # now, not at the end: the memory of autograd's tensor goes back
                parameter.grad = view
        if slots:
            torch._foreach_copy_(slots, grads)
        if scale != 1.0:
            self.buffer.mul_(scale)

    def _check(self, grad: Tensor, position: int) -> None:
        slot, parameter = self.plan.slots[position], self.parameters[position]
        if self.needed is not None and self.needed.is_mean(grad):
            raise RuntimeError(
                f"Gradient of {slot.name!r} still holds the mean of the backward before, of a slice only, because the "
                "optimizer was built with gather_gradients=False. Call optimizer.zero_grad(), with set_to_none=True as "
                "it is by default, before each backward; accumulate under no_sync(), or leave gather_gradients=False "
                "out."
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"Gradient of {slot.name!r}: backward(create_graph=True) under DistributedDataParallel is refused, "
                "because the mean over ranks can't be differentiated. Use torch.autograd.grad(..., create_graph=True), "
                "or call `ddp.module` in place of `ddp` for this step."
            )
        if grad.is_sparse:
            raise RuntimeError(
                f"Gradient of {slot.name!r} is sparse, but was planned as dense: only nn.Embedding(sparse=True) and "
                "nn.EmbeddingBag(sparse=True) are known to have sparse gradients. Make the gradient dense."
            )
        if grad.dtype != self.plan.dtype or grad.device != self.plan.device or grad.shape != parameter.shape:
            raise RuntimeError(
                f"Gradient of {slot.name!r} is {_form(grad)}, but the parameter was {self.plan.dtype} on "
                f"{self.plan.device} with {slot.numel} elements when it was wrapped. Convert and move the module "
                "first, then wrap it in DistributedDataParallel, then build the optimizer."
            )

    def _lies_in_pool(self, grad: Tensor, parameter: Tensor) -> bool:
        """Whether all ranks can reach the gradient, and find the same element at the same place of it."""
        return (
            self._pool is not None
            and self._pool.holds(grad)
            and grad.dtype == self.plan.dtype
            and grad.shape == parameter.shape
            and is_dense(grad)
            and same_order(grad, parameter)
            and not (grad.is_conj() or grad.is_neg())
        )

    def publish(self, position: int) -> None:
        """Make the slot's content the parameter's gradient."""
        parameter, view = self.parameters[position], self.views[position]
        if self.in_place is not None:
            view, self.in_place = self.in_place, None
        if self._as_view:
            if parameter.grad is not view:
                parameter.grad = view
            if self.needed is not None:
                self.needed.mark(view)
        elif parameter.grad is None:
            parameter.grad = view.clone()
        else:
            parameter.grad.copy_(view)

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Take over a gradient that lay in another bucket, when buckets are planned anew."""
        if grad is not None and self._as_view and not self._lies_in_pool(grad, self.parameters[position]):
            self.views[position].copy_(grad)
            self.parameters[position].grad = self.views[position]

    def rescale(self, factor: float) -> None:
        """Multiply what the bucket holds."""
        (self.buffer if self.in_place is None else self.in_place).mul_(factor)


class SparseBucket:
    """One parameter whose gradient is sparse: it keeps what autograd made, and has no memory of its own."""

    def __init__(self, plan: Bucket, parameter: Tensor) -> None:
        self.plan = plan
        self.parameters = [parameter]
        self.mean: Tensor | None = None  # what the ranks have gathered, until it is published

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Check that the gradient is what was planned.

        Raises:
            RuntimeError: the gradient is dense.
        """
        grad = self.parameters[0].grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                f"Gradient of {self.plan.slots[0].name!r} is dense, but its module says sparse=True, and ranks have "
                "planned for it. Use the parameter through its module only, or set sparse=False."
            )

    def publish(self, position: int) -> None:
        """Make the gathered mean the parameter's gradient."""
        self.parameters[position].grad, self.mean = self.mean, None

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Nothing: there is no memory to move to."""

    def rescale(self, factor: float) -> None:
        """Multiply what the ranks have gathered."""
        if self.mean is not None:
            self.mean = self.mean * factor


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with {tensor.numel()} elements"
