"""A bucket is memory for gradients that are reduced together, with views that serve as `.grad`.

buffer    |<- grad of w4 ->|gap|<- grad of b4 ->|gap|       one storage; on backend `phalanx` in symmetric memory
views      parameter.grad       parameter.grad              same memory, the parameter's shape and strides

A view is lent to `.grad` until the next backward. The user may keep the view (`g = p.grad; zero_grad()`) or a view of
it; the bucket then moves to its other buffer, so that a kept gradient is never overwritten. If ranks share memory, a
bucket has two buffers from the start, because all ranks allocate them together; the second costs no memory until it is
used. While one buffer is kept, the other is not lent: gradients are then copies of its content. Without shared memory,
a new buffer is made when needed.

A large gradient has its own bucket. If ranks share memory, autograd writes the gradient directly into a block of a
pool, and nothing is copied; the bucket's own memory, reserved in case the pool has no free block, is neither touched
nor lent. A gradient in the pool is reduced in place if only `.grad` refers to its memory; otherwise a copy of it in the
pool is reduced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.gradient_shards import NeededSlice, find_needed
from phalanx._comm.backend.shared import shares_memory
from phalanx._comm.transport.tensors import copy_all, is_dense, same_order
from phalanx.ddp.plan import Bucket, BucketPlan, Slot
from phalanx.ddp.reference_counts import is_unshared, reference_counts, separate_gradient, storage_use_count

if TYPE_CHECKING:  # needs the C core, which may be missing
    from phalanx._comm.symmetric_memory.pool import SharedPool

_ALIGN = 4096  # a page: unused pages stay untouched, and no two ranks share a cache line


class GradientBuffer:
    """A `GradientBuffer` is one piece of memory for a bucket, and the views of it that are lent as gradients."""

    def __init__(self, flat: Tensor, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        self.flat = flat
        self._plan = plan
        self._parameters = parameters
        self.views = [self._view(position) for position in range(len(plan.slots))]
        self._addresses = [flat.data_ptr() + slot.offset * plan.dtype.itemsize for slot in plan.slots]
        self._lent = False  # whether a view was lent since the last check that found all views returned
        self._unlent = reference_counts(self.views)  # the reference counts while no view is lent
        self._storage_unlent: int | None = None  # the same for the storage; an exchange may have a view of it

    def _view(self, position: int) -> Tensor:
        slot, parameter = self._plan.slots[position], self._parameters[position]
        if is_dense(parameter):  # autograd keeps a gradient in place only when its strides are the parameter's
            return self.flat.as_strided(parameter.shape, parameter.stride(), slot.offset)
        return self.flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)

    def lend(self, position: int) -> None:
        """Make the view the parameter's gradient."""
        if self._storage_unlent is None:
            self._storage_unlent = storage_use_count(self.flat)
        self._lent = True
        self._parameters[position].grad = self.views[position]

    def may_overwrite(self) -> bool:
        """Return whether the bucket may write to the buffer: no view of it is in use other than as a `.grad`.

        Other references to a view in `.grad` do not count: as everywhere in torch, a user who keeps a gradient, or a
        view of it, without setting `.grad` to None sees the gradient change.
        Cost: a tenth of a microsecond per gradient.
        """
        if not self._lent:
            return True
        counts = reference_counts(self.views)
        if counts != self._unlent:
            for position, (now, unlent) in enumerate(zip(counts, self._unlent, strict=True)):
                if now != unlent and self._parameters[position].grad is not self.views[position]:
                    return False
        if storage_use_count(self.flat) != self._storage_unlent and not all(
            parameter.grad is view for parameter, view in zip(self._parameters, self.views, strict=True)
        ):
            return False
        self._lent = counts != self._unlent
        return True

    def refresh_view(self, position: int) -> None:
        """Recreate a view if `module.to(...)` has swapped its memory."""
        if self.views[position].data_ptr() != self._addresses[position]:
            self.views[position] = self._view(position)


def allocate(
    plan: BucketPlan, group: dist.ProcessGroup, *, as_view: bool, pool: SharedPool | None
) -> list[tuple[Tensor, ...]]:
    """Allocate each bucket's buffers, each in its own storage: two, one, or none for a sparse bucket.

    If ranks share memory, all ranks call it: buffers on the CPU are parts of one block that all ranks can access.
    Untouched pages take no memory.
    """
    counts = [0 if bucket.sparse else 2 if as_view and not _is_pooled(bucket, pool) else 1 for bucket in plan.buckets]
    shared = shares_memory(group)
    sizes = [
        _round_up(bucket.num_bytes) if shared and bucket.device.type == "cpu" else 0
        for bucket, count in zip(plan.buckets, counts, strict=True)
        for _ in range(count)
    ]
    starts = [0, *itertools.accumulate(sizes)]
    block = None
    if starts[-1]:
        from phalanx._comm.backend import shared_empty  # needs the C core, which a group that shares memory has

        block = shared_empty(starts[-1], dtype=torch.uint8, group=group).numpy()
    places = iter(zip(starts, sizes, strict=False))
    buffers = []
    for bucket, count in zip(plan.buckets, counts, strict=True):
        own = [next(places) for _ in range(count)]
        if all(size for _, size in own):
            buffers.append(
                tuple(torch.frombuffer(block, dtype=bucket.dtype, count=bucket.numel, offset=start) for start, _ in own)
            )
        else:
            buffers.append((torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device),))
    return buffers


def _is_pooled(bucket: Bucket, pool: SharedPool | None) -> bool:
    """Return whether autograd may write the bucket's only gradient into the pool."""
    return pool is not None and len(bucket.slots) == 1 and pool.serves(bucket.slots[0].numel * bucket.dtype.itemsize)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def check_gradient(grad: Tensor, parameter: Tensor, plan: Bucket, slot: Slot) -> None:
    """Check that autograd's gradient matches the plan of its bucket.

    Raises:
        RuntimeError: the gradient is sparse, was computed with create_graph=True, or does not match because the
            parameter's dtype, device or shape has changed since it was wrapped.
    """
    if grad.requires_grad:
        raise RuntimeError(
            f"Gradient of {slot.name!r}: backward(create_graph=True) under DistributedDataParallel is refused, "
            "because the mean over ranks cannot be differentiated. Use torch.autograd.grad(..., create_graph=True), "
            "or call `ddp.module` instead of `ddp` for this step."
        )
    if grad.is_sparse:
        raise RuntimeError(
            f"Gradient of {slot.name!r} is sparse, but was planned as dense: only nn.Embedding(sparse=True) and "
            "nn.EmbeddingBag(sparse=True) are known to have sparse gradients. Make the gradient dense."
        )
    if grad.dtype != plan.dtype or grad.device != plan.device or grad.shape != parameter.shape:
        raise RuntimeError(
            f"Gradient of {slot.name!r} is {_form(grad)}, but the parameter was {plan.dtype} on "
            f"{plan.device} with {slot.numel} elements when it was wrapped. Convert and move the module "
            "first, then wrap it in DistributedDataParallel, then build the optimizer."
        )


class DenseBucket:
    """A `DenseBucket` is a planned bucket with its memory. `parameters` are the parameters of its slots, in order.

    With `as_view` a parameter's `.grad` becomes a view of the bucket; without it, gradients are copied in and out.
    `buffer` and `spare` are the memory of its two buffers. With `as_view`, autograd may have written the gradient of a
    bucket of one parameter into `pool`, which belongs to `group`. This rank may need the mean of only a slice of such
    a gradient.
    """

    def __init__(
        self,
        plan: Bucket,
        parameters: Sequence[Tensor],
        buffer: Tensor,
        spare: Tensor | None = None,
        *,
        as_view: bool,
        pool: SharedPool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        self._as_view = as_view
        self._pool = pool if as_view and _is_pooled(plan, pool) else None
        self._group = group
        self.needed: NeededSlice | None = None  # the slice that this rank needs in this round; None for all of it
        self.in_place: Tensor | None = None  # this round's gradient, if it is in the pool
        # The last published gradients that are not views of a buffer.
        self._published: list[weakref.ref[Tensor] | None] = [None] * len(plan.slots)
        self._current = self._make_buffer(buffer)
        self._spare: GradientBuffer | Tensor | None = spare  # a plain tensor until it is used
        self._lends = True  # whether gradients of this round may be views of the buffer

    @property
    def buffer(self) -> Tensor:
        """Return the bucket's memory in this round, unless `in_place` replaces it."""
        return self._current.flat

    @property
    def may_stay_in_place(self) -> bool:
        """Return whether the gradient may be reduced where autograd wrote it."""
        return self._pool is not None

    def _make_buffer(self, flat: Tensor) -> GradientBuffer:
        if len(self.plan.slots) > 1:
            flat.zero_()  # the gaps; a single gradient has none, and may never be copied here
        return GradientBuffer(flat, self.plan, self.parameters)

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Put `scale` times each parameter's gradient into its slot; zero for a parameter without a gradient.

        A `.grad` that is already a view of the slot is not copied. `written` marks the gradients that this backward
        wrote; the others are only read, because they stay unchanged if no other rank wrote them either.

        A gradient that autograd has just made is copied once, and its memory released. The alternative, zeroing the
        slot and letting autograd add to it, touches each byte of the bucket three times.

        Raises:
            RuntimeError: a gradient is sparse, was computed with create_graph=True, or does not match because the
                parameter's dtype, device or shape has changed since it was wrapped; or it is still a mean of a slice.
        """
        self.in_place = self.needed = None
        if self._pool is not None and self._group is not None:
            self.needed = find_needed(self.parameters[0], self._group)
            if self._use_in_place(self._pool, written=written[0]):
                return
        if self._as_view:
            self._choose_buffer()
        slots, grads = [], []
        for position, parameter in enumerate(self.parameters):
            grad, view = parameter.grad, self._current.views[position]
            if grad is None:
                view.zero_()
                continue
            self._check(grad, position)
            if grad is view:
                continue
            slots.append(view)
            grads.append(grad)
            if self._as_view and written[position] and self._lends:
                self._current.lend(position)  # now, not at the end: this releases the memory of autograd's tensor
        if slots:
            copy_all(slots, grads)
        if scale != 1.0:
            self.buffer.mul_(scale)

    def _use_in_place(self, pool: SharedPool, *, written: bool) -> bool:
        """Set `in_place` to the gradient if it is in the pool and unshared, otherwise to a copy in the pool.

        If `.grad` is still the mean that the last round published, it is reduced in place even if others refer to it:
        the user did not call zero_grad, or called it with set_to_none=False. If there is no gradient, or no room in the
        pool, return False and change nothing.
        """
        (parameter,) = self.parameters
        if parameter.grad is None:
            return False
        self._check(parameter.grad, 0)
        if written and self._is_in(pool, parameter.grad) and (self._is_published(0) or is_unshared(parameter)):
            self.in_place = parameter.grad
            return True
        stride = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        self.in_place = pool.empty_strided(parameter.shape, stride, parameter.dtype)
        if self.in_place is None:
            return False
        self.in_place.copy_(parameter.grad)
        if written:
            parameter.grad = self.in_place
        return True

    def _is_published(self, position: int) -> bool:
        published = self._published[position]
        return published is not None and published() is self.parameters[position].grad

    def _choose_buffer(self) -> None:
        """Switch to a buffer without other references, and check whether another is free for the next round."""
        for position in range(len(self.parameters)):
            self._current.refresh_view(position)
        if self._pool is not None:
            self._lends = False
        elif self._spare is None:
            if not self._current.may_overwrite():
                self._current = self._make_buffer(torch.zeros_like(self._current.flat))
        else:
            kept = not self._current.may_overwrite()
            free = isinstance(self._spare, Tensor) or self._spare.may_overwrite()
            if kept and free:
                spare = self._make_buffer(self._spare) if isinstance(self._spare, Tensor) else self._spare
                self._current, self._spare = spare, self._current
            self._lends = free and not kept

    def _check(self, grad: Tensor, position: int) -> None:
        slot, parameter = self.plan.slots[position], self.parameters[position]
        if self.needed is not None and self.needed.is_mean(grad):
            raise RuntimeError(
                f"Gradient of {slot.name!r} still holds the mean of the previous backward, only in a slice, because "
                "the optimizer was built with gather_gradients=False. Call optimizer.zero_grad(), whose default is "
                "set_to_none=True, before each backward. To accumulate gradients, use no_sync(), or remove "
                "gather_gradients=False."
            )
        check_gradient(grad, parameter, self.plan, slot)

    def _is_in(self, pool: SharedPool, grad: Tensor) -> bool:
        """Return whether the gradient is in the pool, with the same element at the same place on every rank.

        Its storage must be torch's own: numpy and dlpack create another storage of the same memory, with its own
        reference count.
        """
        (parameter,) = self.parameters
        return (
            pool.contains(grad)
            and grad.untyped_storage().resizable()
            and grad.dtype == self.plan.dtype
            and grad.shape == parameter.shape
            and is_dense(grad)
            and same_order(grad, parameter)
            and not (grad.is_conj() or grad.is_neg())
        )

    def publish(self, position: int) -> None:
        """Make the slot's content the parameter's gradient."""
        parameter, view = self.parameters[position], self._current.views[position]
        if self.in_place is not None:
            self._set_grad(position, self.in_place)
            self.in_place = None
        elif self._as_view and self._lends:
            if parameter.grad is not view:
                self._current.lend(position)
        elif parameter.grad is not None and (not self._as_view or self._is_published(position)):
            parameter.grad.copy_(view)
        elif parameter.grad is not view:
            self._set_grad(position, view.clone())
        if self.needed is not None and parameter.grad is not None:
            self.needed.mark(parameter.grad)

    def _set_grad(self, position: int, gradient: Tensor) -> None:
        if self.parameters[position].grad is not gradient:
            self.parameters[position].grad = gradient
        self._published[position] = weakref.ref(gradient)

    def separate(self, position: int) -> None:
        """Copy the gradient to memory of its own if another tensor shares its memory."""
        separate_gradient(self.parameters[position])

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Move a gradient from a bucket of the previous plan into this bucket."""
        if grad is None or not self._as_view:
            return
        if self._pool is None:
            self._current.views[position].copy_(grad)
            self._current.lend(position)
        elif self._is_in(self._pool, grad):
            self._published[position] = weakref.ref(grad)

    def rescale(self, factor: float) -> None:
        (self.buffer if self.in_place is None else self.in_place).mul_(factor)


class SparseBucket:
    """A `SparseBucket` is one parameter with a sparse gradient: it keeps autograd's tensor, and has no memory."""

    may_stay_in_place = True  # autograd's tensor is sent

    def __init__(self, plan: Bucket, parameter: Tensor) -> None:
        self.plan = plan
        self.parameters = [parameter]
        self.mean: Tensor | None = None  # the gathered mean, until it is published

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Check that the gradient matches the plan.

        Raises:
            RuntimeError: the gradient is dense.
        """
        grad = self.parameters[0].grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                f"Gradient of {self.plan.slots[0].name!r} is dense, but its module says sparse=True, and the "
                "buckets were planned for it. Use the parameter through its module only, or set sparse=False."
            )

    def publish(self, position: int) -> None:
        """Make the gathered mean the parameter's gradient."""
        self.parameters[position].grad, self.mean = self.mean, None

    def separate(self, position: int) -> None:
        """Do nothing: autograd does not accumulate sparse gradients in place."""

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Do nothing: a sparse bucket has no memory."""

    def rescale(self, factor: float) -> None:
        """Multiply the gathered mean by `factor`."""
        if self.mean is not None:
            self.mean = self.mean * factor


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with {tensor.numel()} elements"
