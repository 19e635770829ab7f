"""Exchanges replace each bucket by its mean over all ranks: the interface between the reducer and communication.

The reducer calls `launch` for each bucket, in the plan's order on every rank, from autograd's thread during backward,
and `PendingBucket.wait` for each, in the same order, at the end of backward. `WorkExchange` works on any backend,
`SharedExchange` on buckets in the shared heap; `comm_hook` has an exchange for users' hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.shared import shares_memory
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx.ddp.bucket import DenseBucket, SparseBucket


class PendingBucket(Protocol):
    """A `PendingBucket` is a launched bucket."""

    def wait(self) -> None:
        """Wait until the bucket's buffer holds the mean over all ranks."""


class Exchange(Protocol):
    """An `Exchange` replaces buckets of local gradients by their mean, bitwise identical on every rank."""

    scale: float
    """The factor by which each gradient is multiplied when it is copied into the bucket."""

    def launch(self, bucket: DenseBucket) -> PendingBucket:
        """Launch a bucket that is complete on this rank; the order of buckets is the same on every rank."""


class WorkExchange:
    """A `WorkExchange` averages with the group's `all_reduce(async_op=True)`, on any backend.

    Numerics: if the backend has no AVG, each gradient is divided before the sum, as in PyTorch, so half-precision sums
    do not overflow, and the result is bitwise identical to PyTorch's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        averages = shares_memory(group) or dist.get_backend(group) == "nccl"
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self.scale = 1.0 if averages else 1.0 / group.size()

    def launch(self, bucket: DenseBucket) -> PendingBucket:
        """Start one all_reduce of the bucket's memory, in place."""
        work: PendingBucket | None = dist.all_reduce(bucket.buffer, op=self._op, group=self._group, async_op=True)
        assert work is not None  # None is for ranks outside the group, which cannot wrap a module
        return work


class SharedExchange:
    """A `SharedExchange` averages gradients in place, in the ranks' shared heap, without a thread, queue or copy.

    Construction is collective.

    Each rank marks its complete buckets. At each launch a rank looks for buckets that are complete on all ranks, and
    reduces its own slice of them, reading and writing all ranks' memory directly. csrc/reducer.h has a picture and
    the proof.

    Every round reduces every bucket once, in any order; a round ends with the first `wait`.
    Numerics: the sum in rank order, divided by the number of ranks; half types accumulate in float32.
    """

    scale = 1.0

    def __init__(self, group: dist.ProcessGroup, buckets: Sequence[DenseBucket]) -> None:
        from phalanx._comm.backend.shared_reducer import SharedReducer

        filled = [bucket for bucket in buckets if bucket.plan.numel]  # an empty tensor has no place in memory
        self._numbers = {id(bucket): number for number, bucket in enumerate(filled)}
        self.reducer = SharedReducer(group, [_real(_content(bucket)) for bucket in filled], dist.ReduceOp.AVG)
        self._open = False

    def launch(self, bucket: DenseBucket) -> SharedExchange:
        """Mark this rank's bucket as complete, and reduce the buckets that are complete on all ranks."""
        if not self._open:
            self._open = True
            self.reducer.begin()
        number = self._numbers.get(id(bucket))
        if number is not None:
            where = bucket.buffer if bucket.in_place is None else bucket.in_place
            self.reducer.ready(number, _real(where), _needed(bucket))
        return self

    def wait(self) -> None:
        """Wait until every bucket of the round holds the mean."""
        if self._open:
            self._open = False
            self.reducer.finish()


def _content(bucket: DenseBucket) -> Tensor:
    """Return the bucket's memory, without the gap after a single gradient, since gradients in the pool have no gap."""
    (first, *others) = bucket.plan.slots
    return bucket.buffer if others else bucket.buffer[: first.numel]


def _needed(bucket: DenseBucket) -> tuple[int, int] | None:
    """Return the range of the bucket's elements that this rank needs; a complex element counts as two."""
    if bucket.needed is None:
        return None
    parts = 2 if bucket.plan.dtype.is_complex else 1
    return bucket.needed.start * parts, bucket.needed.stop * parts


def _real(buffer: Tensor) -> Tensor:
    """Return a complex buffer as a real one: the mean of complex numbers is the mean of their parts."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


class SparsePending:
    """A `SparsePending` averages one sparse gradient by gathering all ranks' indices and values.

    Cost: each of the P ranks receives P times the largest number of entries: worthwhile only for very sparse gradients.
    Numerics: summed in rank order; bitwise identical on all ranks.
    """

    def __init__(self, bucket: SparseBucket, grad: Tensor | None, group: dist.ProcessGroup) -> None:
        self._bucket = bucket
        self._group = group
        parameter = bucket.parameters[0]
        if grad is None:  # nothing to contribute, but the other ranks wait for this rank
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                device=parameter.device,
                check_invariants=False,
            )
        self._grad = grad.coalesce()
        # With shared memory, `wait` runs the exchange: the program waits there anyway, and a thread would add a switch.
        self._direct = parameter.is_cpu and shares_memory(group)
        if self._direct:
            return
        count = torch.tensor([self._grad.values().shape[0]], device=parameter.device)
        self._counts = [torch.empty_like(count) for _ in range(group.size())]
        self._work = dist.all_gather(self._counts, count, group=group, async_op=True)

    def wait(self) -> None:
        """Exchange the entries once all ranks know the counts, and pass the mean to the bucket."""
        if self._direct:
            ours = phalanx_group(self._group)
            assert ours is not None
            self._bucket.mean = ours.sparse_mean(self._grad)
            return
        assert self._work is not None
        self._work.wait()
        counts = [int(count) for count in self._counts]
        indices = _gather(self._grad.indices().t(), counts, self._group)
        values = _gather(self._grad.values(), counts, self._group)
        values /= self._group.size()
        shape, device = self._grad.shape, values.device
        summed = torch.sparse_coo_tensor(indices.t(), values, shape, device=device, check_invariants=False)
        self._bucket.mean = summed.coalesce()


def _gather(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks, which may have different numbers of rows."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])
