"""A `BucketSet` owns the reducer's buckets: the current plan, their memory, and the exchange that averages them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.gradient_shards import LARGE_BYTES
from phalanx._comm.backend.shared import shared_empty, shares_memory, sharing_group
from phalanx.ddp.bucket import DenseBucket, SparseBucket, allocate, check_gradient
from phalanx.ddp.exchange import Exchange, SharedExchange, WorkExchange
from phalanx.ddp.plan import Bucket, BucketPlan, ParameterSpec, plan_buckets
from phalanx.ddp.reference_counts import separate_gradient

if TYPE_CHECKING:  # needs the C core, which may be missing
    from phalanx._comm.symmetric_memory.pool import SharedPool


class BucketSet:
    """A `BucketSet` has buckets for the gradients of `parameters`, which `specs` describe in the same order.

    If ranks share memory, the constructor and `adopt` are collective calls.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[Tensor],
        *,
        caps_mb: Sequence[float],
        group: dist.ProcessGroup,
        as_view: bool,
    ) -> None:
        self._specs = specs
        self._parameters = parameters
        self._caps_mb = list(caps_mb)
        self.group = group
        self._as_view = as_view
        self._own_exchange: Exchange | None = None
        self.pool = _share_memory_for(specs, group) if as_view else None
        self.plan: BucketPlan
        self.buckets: list[DenseBucket | LocalBucket | SparseBucket]
        self.places: dict[int, tuple[int, int]]
        """The number of each parameter's bucket, and the parameter's position in the bucket."""
        self.exchange: Exchange
        self.adopt(self.plan_in())

    @property
    def has_own_exchange(self) -> bool:
        return self._own_exchange is not None

    def use_exchange(self, exchange: Exchange) -> None:
        """Use `exchange` for the buckets of this plan and later plans, each in one block. All ranks call it."""
        self.exchange = self._own_exchange = exchange
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        elif self.group.size() > 1:
            return
        self.adopt(self.plan_in())

    def plan_in(self, order: Sequence[int] | None = None) -> BucketPlan:
        """Plan buckets for gradients that become ready in this order; the default is reverse registration order."""
        return plan_buckets(self._specs, self._caps_mb, order, None if self.pool is None else LARGE_BYTES)

    def adopt(self, plan: BucketPlan, gradients: Sequence[Tensor | None] | None = None) -> None:
        """Replace the buckets by those of `plan`, and move `gradients` into them."""
        self.plan, self.buckets = plan, []
        alone = self.group.size() == 1 and self._own_exchange is None
        nothing: list[tuple[Tensor, ...]] = [()] * len(plan.buckets)
        memories = nothing if alone else allocate(plan, self.group, as_view=self._as_view, pool=self.pool)
        for bucket, memory in zip(plan.buckets, memories, strict=True):
            members = [self._parameters[slot.parameter] for slot in bucket.slots]
            if bucket.sparse:
                self.buckets.append(SparseBucket(bucket, members[0]))
            elif alone:
                self.buckets.append(LocalBucket(bucket, members))
            else:
                self.buckets.append(
                    DenseBucket(bucket, members, *memory, as_view=self._as_view, pool=self.pool, group=self.group)
                )
        self.places = {
            slot.parameter: (bucket.index, position)
            for bucket in plan.buckets
            for position, slot in enumerate(bucket.slots)
        }
        dense = [bucket for bucket in self.buckets if isinstance(bucket, DenseBucket)]
        self.exchange = self._own_exchange or _choose_exchange(self.group, dense)
        if gradients is not None:
            for index, (number, position) in self.places.items():
                self.buckets[number].adopt(position, gradients[index])


def _share_memory_for(specs: Sequence[ParameterSpec], group: dist.ProcessGroup) -> SharedPool | None:
    """Return a pool of shared memory into which autograd can write large gradients; None if no pool is of use."""
    sizes = Counter(
        nbytes
        for spec in specs
        if not spec.sparse and spec.device.type == "cpu"
        if (nbytes := spec.numel * spec.dtype.itemsize) >= LARGE_BYTES
    )
    ours = sharing_group(group)
    if not sizes or ours is None or group.size() == 1:
        return None
    from phalanx._comm.symmetric_memory.pool import SharedPool  # needs the C core, which a group that shares memory has

    return SharedPool(ours.symm_mem, sizes, lambda nbytes: shared_empty(nbytes, dtype=torch.uint8, group=group))


def _choose_exchange(group: dist.ProcessGroup, buckets: Sequence[DenseBucket]) -> Exchange:
    """Return a `SharedExchange` if all ranks can access the buckets' memory; otherwise a `WorkExchange`."""
    if shares_memory(group) and any(bucket.plan.numel and bucket.plan.device.type == "cpu" for bucket in buckets):
        return SharedExchange(group, buckets)
    return WorkExchange(group)


class LocalBucket:
    """A `LocalBucket` is a bucket of a single rank: gradients stay where autograd wrote them, and nothing is sent.

    It refuses the same gradients as the buckets of several ranks do, so that a model that trains on one rank also
    trains on several.
    """

    may_stay_in_place = True

    def __init__(self, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        self.plan = plan
        self.parameters = list(parameters)

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Check that each gradient matches the plan.

        Raises:
            RuntimeError: a gradient does not match.
        """
        for parameter, slot in zip(self.parameters, self.plan.slots, strict=True):
            if parameter.grad is not None:
                check_gradient(parameter.grad, parameter, self.plan, slot)

    def publish(self, position: int) -> None:
        """Keep the gradient, in its own memory; create zeros if there is none, as with several ranks."""
        parameter = self.parameters[position]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            self.separate(position)

    def separate(self, position: int) -> None:
        """Copy the gradient to memory of its own if another tensor shares its memory."""
        separate_gradient(self.parameters[position])

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Do nothing: the gradient stays where it is."""

    def rescale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
