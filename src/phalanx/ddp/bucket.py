"""A bucket has memory for some gradients, and views in it that serve as gradients.

buffer    |<- grad of w4 ->|gap|<- grad of b4 ->|gap|       one storage; on backend `phalanx` in symmetric memory
views      parameter.grad       parameter.grad              same memory, the parameter's shape and strides

A view is lent to `.grad` until the next backward, and the user may keep it, as `g = p.grad; zero_grad()` does, or some
view of it. What is kept is not written again: the bucket moves to its other buffer. It has two where ranks share
memory, because that is allocated by all ranks together; the second is not touched, and costs no memory, until then.
While one is kept the other is not lent: gradients are copies of what is in it. Elsewhere a new one is made when it is
needed.

A large gradient has a bucket to itself, and where ranks share memory autograd writes it there in the first place, into
a block of a pool. Then nothing is moved, and the bucket's own memory, reserved for what the pool has no block for, is
never touched, nor lent. A gradient in the pool is reduced where it lies if nobody but `.grad` has its memory; else a
copy of it in the pool is.
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
from phalanx.ddp.holders import is_alone, separate_gradient, storage_holders, view_holders
from phalanx.ddp.plan import Bucket, BucketPlan, Slot

if TYPE_CHECKING:  # needs the C core, which may not be there
    from phalanx._comm.symmetric_memory.pool import SharedPool

_ALIGN = 4096  # a page: pages that are not used are not touched, and no two ranks' caches meet


class GradientBuffer:
    """A `GradientBuffer` is one piece of memory for a bucket, and the views of it that are lent as gradients."""

    def __init__(self, flat: Tensor, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        self.flat = flat
        self._plan = plan
        self._parameters = parameters
        self.views = [self._view(position) for position in range(len(plan.slots))]
        self._addresses = [flat.data_ptr() + slot.offset * plan.dtype.itemsize for slot in plan.slots]
        self._lent = False  # whether a view was lent since all were last seen to have come back
        self._alone = view_holders(self.views)  # the counts while no view is lent
        self._storage_alone: int | None = None  # the same; an exchange may have a view of its own

    def _view(self, position: int) -> Tensor:
        slot, parameter = self._plan.slots[position], self._parameters[position]
        if is_dense(parameter):  # autograd keeps a gradient in place only when its strides are the parameter's
            return self.flat.as_strided(parameter.shape, parameter.stride(), slot.offset)
        return self.flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)

    def lend(self, position: int) -> None:
        """Make the view the parameter's gradient."""
        if self._storage_alone is None:
            self._storage_alone = storage_holders(self.flat)
        self._lent = True
        self._parameters[position].grad = self.views[position]

    def is_ours(self) -> bool:
        """Return whether no reference holds what was lent, apart from `.grad`, where autograd has added to it or will.

        A user who keeps a gradient without setting `.grad` to None, or a view of one, sees it change, as everywhere in
        torch.
        Cost: a tenth of a microsecond per gradient.
        """
        if not self._lent:
            return True
        holders = view_holders(self.views)
        if holders != self._alone:
            for position, (now, alone) in enumerate(zip(holders, self._alone, strict=True)):
                if now != alone and self._parameters[position].grad is not self.views[position]:
                    return False
        if storage_holders(self.flat) != self._storage_alone and not all(
            parameter.grad is view for parameter, view in zip(self._parameters, self.views, strict=True)
        ):
            return False
        self._lent = holders != self._alone
        return True

    def find_moved(self, position: int) -> bool:
        """Return whether `module.to(...)` swapped the memory under the view, as with gradients; then make it anew."""
        if self.views[position].data_ptr() == self._addresses[position]:
            return False
        self.views[position] = self._view(position)
        return True


def allocate(
    plan: BucketPlan, group: dist.ProcessGroup, *, as_view: bool, pool: SharedPool | None
) -> list[tuple[Tensor, ...]]:
    """Allocate memory for each bucket of a plan, with a storage of its own: one piece, or two (see the module).

    Where ranks share memory, all call it: all of it is one block that all can reach. Untouched memory costs nothing.
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
    """Check that autograd's gradient is what its bucket was planned for.

    Raises:
        RuntimeError: it is sparse, was built with create_graph=True, or the parameter changed its dtype, device or
            shape since it was wrapped.
    """
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
    if grad.dtype != plan.dtype or grad.device != plan.device or grad.shape != parameter.shape:
        raise RuntimeError(
            f"Gradient of {slot.name!r} is {_form(grad)}, but the parameter was {plan.dtype} on "
            f"{plan.device} with {slot.numel} elements when it was wrapped. Convert and move the module "
            "first, then wrap it in DistributedDataParallel, then build the optimizer."
        )


class DenseBucket:
    """A `DenseBucket` is a planned bucket with its memory. `parameters` are those of its slots, in the slots' order.

    With `as_view` a parameter's `.grad` becomes a view of the bucket; without it, gradients are copied in and out.
    `buffer` is the memory of its first buffer, `spare` that of the second. `pool`, of `group`, is where autograd may
    have written the gradient of a bucket that has but one; that happens with `as_view` only. This rank may need only
    the mean of a slice of such a gradient.
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
        self.needed: NeededSlice | None = None  # the slice of this round; None for all of it
        self.in_place: Tensor | None = None  # this round's gradient, if the pool holds it
        # These were given out last, where they are not views of a buffer.
        self._published: list[weakref.ref[Tensor] | None] = [None] * len(plan.slots)
        self._current = self._make_buffer(buffer)
        self._spare: GradientBuffer | Tensor | None = spare  # a tensor while it has not been used
        self._lends = True  # whether gradients of this round may be views of the buffer

    @property
    def buffer(self) -> Tensor:
        """Return where the bucket lies in this round, unless `in_place` stands in for it."""
        return self._current.flat

    @property
    def may_stay_in_place(self) -> bool:
        """Return whether the gradient may be reduced where autograd wrote it."""
        return self._pool is not None

    @property
    def views(self) -> list[Tensor]:
        """Return the gradients' places in the buffer."""
        return self._current.views

    def _make_buffer(self, flat: Tensor) -> GradientBuffer:
        if len(self.plan.slots) > 1:
            flat.zero_()  # the gaps; a single gradient leaves none, and may never come here
        return GradientBuffer(flat, self.plan, self.parameters)

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
            if self._take_in_place(self._pool, written=written[0]):
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
                self._current.lend(position)  # now, not at the end: the memory of autograd's tensor goes back
        if slots:
            copy_all(slots, grads)
        if scale != 1.0:
            self.buffer.mul_(scale)

    def _take_in_place(self, pool: SharedPool, *, written: bool) -> bool:
        """Take the gradient where it lies in the pool, or, if it is not ours alone, a copy of it there.

        What was given out as the mean of the last round, and is still there, is autograd's to add to and ours to
        average, whoever else looks at it: there was no zero_grad, or one that keeps the tensors.
        """
        (parameter,) = self.parameters
        if parameter.grad is None:
            return False
        self._check(parameter.grad, 0)
        if written and self._lies_in(pool, parameter.grad) and (self._is_published(0) or is_alone(parameter)):
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
        """Move to a buffer that nobody else holds, and see whether there would be another for the next time."""
        for position in range(len(self.parameters)):
            self._current.find_moved(position)
        if self._pool is not None:
            self._lends = False
        elif self._spare is None:
            if not self._current.is_ours():
                self._current = self._make_buffer(torch.zeros_like(self._current.flat))
        else:
            kept = not self._current.is_ours()
            free = isinstance(self._spare, Tensor) or self._spare.is_ours()
            if kept and free:
                spare = self._make_buffer(self._spare) if isinstance(self._spare, Tensor) else self._spare
                self._current, self._spare = spare, self._current
            self._lends = free and not kept

    def _check(self, grad: Tensor, position: int) -> None:
        slot, parameter = self.plan.slots[position], self.parameters[position]
        if self.needed is not None and self.needed.is_mean(grad):
            raise RuntimeError(
                f"Gradient of {slot.name!r} still holds the mean of the backward before, of a slice only, because the "
                "optimizer was built with gather_gradients=False. Call optimizer.zero_grad(), with set_to_none=True as "
                "it is by default, before each backward; accumulate under no_sync(), or leave gather_gradients=False "
                "out."
            )
        check_gradient(grad, parameter, self.plan, slot)

    def _lies_in(self, pool: SharedPool, grad: Tensor) -> bool:
        """Return whether all ranks can reach the gradient, and find the same element at the same place of it.

        The memory must be the allocator's own: what numpy or dlpack hand back has a storage, and a count, of its own.
        """
        (parameter,) = self.parameters
        return (
            pool.holds(grad)
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
            self._give(position, self.in_place)
            self.in_place = None
        elif self._as_view and self._lends:
            if parameter.grad is not view:
                self._current.lend(position)
        elif parameter.grad is not None and (not self._as_view or self._is_published(position)):
            parameter.grad.copy_(view)
        elif parameter.grad is not view:
            self._give(position, view.clone())
        if self.needed is not None and parameter.grad is not None:
            self.needed.mark(parameter.grad)

    def _give(self, position: int, gradient: Tensor) -> None:
        if self.parameters[position].grad is not gradient:
            self.parameters[position].grad = gradient
        self._published[position] = weakref.ref(gradient)

    def separate(self, position: int) -> None:
        """Move a gradient that autograd has made out of memory that others hold as well."""
        separate_gradient(self.parameters[position])

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Take over a gradient that lay in another bucket, when buckets are planned anew."""
        if grad is None or not self._as_view:
            return
        if self._pool is None:
            self._current.views[position].copy_(grad)
            self._current.lend(position)
        elif self._lies_in(self._pool, grad):
            self._published[position] = weakref.ref(grad)

    def rescale(self, factor: float) -> None:
        (self.buffer if self.in_place is None else self.in_place).mul_(factor)


class SparseBucket:
    """A `SparseBucket` is one parameter whose gradient is sparse: it keeps what autograd made, without own memory."""

    may_stay_in_place = True  # what autograd made is sent

    def __init__(self, plan: Bucket, parameter: Tensor) -> None:
        self.plan = plan
        self.parameters = [parameter]
        self.mean: Tensor | None = None  # the mean that the ranks have gathered, until it is published

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Check that the gradient is what was planned.

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
        """Do nothing: autograd adds sparse gradients to new memory."""

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Do nothing: there is no memory to move to."""

    def rescale(self, factor: float) -> None:
        """Multiply what the ranks have gathered by `factor`."""
        if self.mean is not None:
            self.mean = self.mean * factor


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with {tensor.numel()} elements"
