"""Assign gradients to buckets. The resulting plan is plain data.

    order in which gradients become ready  ->   w4 b4 w3 b3 ... w1 b1
    bucket 0 (small: it is sent early)          [w4 |b4 ]
    bucket 1                                            [w3      |b3 |w2      |b2 ]
    bucket 2                                                                       [w1      |b1 ]

A plan is the same on every rank, because it is computed from common data: the parameters in order of registration, or
the order in which rank 0's gradients became ready, which rank 0 broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25.0
FIRST_CAP_MB = 1.0  # as in PyTorch: the first bucket is small, so that communication starts early in backward
ALIGN_BYTES = 64  # a cache line: no two gradients share one, and slots are aligned for the widest vector instructions


@dataclass(frozen=True)
class ParameterSpec:
    """A `ParameterSpec` describes a parameter for the plan. `owner` is the class of its module, for messages."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    owner: str = "Module"
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements of the parameter and of its gradient."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.owner})"


@dataclass(frozen=True)
class Slot:
    """A `Slot` is a gradient's place in a bucket. `parameter` is the parameter's index, `offset` is in elements."""

    parameter: int
    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """A `Bucket` is a set of gradients that are sent together.

    A sparse bucket has one parameter and no memory, since its size is not known in advance.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    slots: tuple[Slot, ...]
    sparse: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the size of the bucket's memory, including alignment gaps."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """A `BucketPlan` has all buckets in the order in which every rank sends them. `print(plan)` draws it."""

    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    caps_mb: Sequence[float],
    order: Sequence[int] | None = None,
    alone_bytes: int | None = None,
) -> BucketPlan:
    """Assign the gradients of `parameters` to buckets, in the `order` in which they become ready.

    `order` lists positions in `parameters`; the default is the reverse of registration, the usual order of backward.
    A bucket is closed once it reaches its cap: the k-th bucket of a dtype and device has the k-th of `caps_mb` (MiB),
    and the last cap applies to all later buckets. A gradient of `alone_bytes` or more has its own bucket. Buckets are
    numbered in the order in which their last gradients become ready.

    Raises:
        ValueError: a cap is not a positive number, or `order` is not a permutation of the parameters.

    Source: Li et al. (2020), PyTorch Distributed, section 3.2.3.
    """
    if not caps_mb or any(not cap > 0 for cap in caps_mb):
        raise ValueError(f"bucket caps must be positive numbers of MiB, got {list(caps_mb)}")
    if order is None:
        order = range(len(parameters) - 1, -1, -1)
    elif sorted(order) != list(range(len(parameters))):
        raise ValueError(f"order must name each of the {len(parameters)} parameters once, got {list(order)}")

    finished: list[tuple[int, list[int]]] = []  # (position at which the last member is ready, members)
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    num_closed: dict[tuple[torch.dtype, torch.device], int] = {}
    for moment, index in enumerate(order):
        spec = parameters[index]
        if spec.sparse or (alone_bytes is not None and spec.numel * spec.dtype.itemsize >= alone_bytes):
            finished.append((moment, [index]))
            continue
        key = (spec.dtype, spec.device)
        members = filling.setdefault(key, [])
        members.append(index)
        closed = num_closed.get(key, 0)
        cap_bytes = caps_mb[min(closed, len(caps_mb) - 1)] * MIB
        if sum(parameters[i].numel for i in members) * spec.dtype.itemsize >= cap_bytes:
            finished.append((moment, filling.pop(key)))
            num_closed[key] = closed + 1
    moments = {index: moment for moment, index in enumerate(order)}
    finished += [(moments[members[-1]], members) for members in filling.values()]
    finished.sort()
    return BucketPlan(tuple(_place(number, parameters, members) for number, (_, members) in enumerate(finished)))


def _place(number: int, parameters: Sequence[ParameterSpec], members: Sequence[int]) -> Bucket:
    first = parameters[members[0]]
    align = max(1, ALIGN_BYTES // first.dtype.itemsize)
    slots, offset = [], 0
    for index in members:
        spec = parameters[index]
        slots.append(Slot(index, spec.name, offset, spec.numel))
        if not first.sparse:
            offset += math.ceil(spec.numel / align) * align
    return Bucket(number, first.dtype, first.device, offset, tuple(slots), first.sparse)


def _lines(plan: BucketPlan) -> Iterator[str]:
    gradients = sum(len(bucket.slots) for bucket in plan.buckets)
    total = sum(bucket.num_bytes for bucket in plan.buckets)
    yield f"{gradients} gradients in {len(plan.buckets)} buckets, {total / MIB:.2f} MiB"
    for bucket in plan.buckets:
        dtype = str(bucket.dtype).removeprefix("torch.")
        size = "sparse" if bucket.sparse else f"{bucket.num_bytes / MIB:.2f} MiB"
        yield f"bucket {bucket.index}: {dtype} on {bucket.device}, {size}"
        for slot in bucket.slots:
            yield f"  {slot.offset:>10}  {slot.name} ({slot.numel})"
