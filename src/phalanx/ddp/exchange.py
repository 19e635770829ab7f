"""How a bucket becomes the mean over all ranks: the one seam between the reducer's order and communication.

The reducer calls `launch` for each bucket, in the plan's order on every rank, from autograd's thread while backward
goes on, and `Pending.wait` for each, in the same order, when backward is done. What happens between is the exchange's
affair: one for any backend is here, one for buckets in the shared heap in `board`, one for users' hooks in `comm_hook`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.shared import shares_memory
from phalanx.backend.uneven import absent_ranks, training_step
from phalanx.ddp.bucket import DenseBucket, SparseBucket


class Pending(Protocol):
    """A bucket on its way."""

    def wait(self) -> None:
        """Return when the bucket's buffer holds the mean over all ranks."""


class Exchange(Protocol):
    """Turns buckets of local gradients into buckets of their mean. Same bits on every rank."""

    scale: float
    """What each gradient is multiplied by when it is put into the bucket."""

    def launch(self, bucket: DenseBucket) -> Pending:
        """Start on a bucket that is complete on this rank; the same order of buckets on every rank."""


@runtime_checkable
class Counted(Protocol):
    """An exchange whose rounds have numbers, which must be the same on every rank."""

    round: int


class WorkExchange:
    """The mean through `all_reduce(async_op=True)` of whatever backend the group has.

    Numerics: where the backend has no AVG, each gradient is divided before the sum, like in PyTorch: half types don't
    overflow, and the bits are PyTorch's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        averages = shares_memory(group) or dist.get_backend(group) == "nccl"
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self.scale = 1.0 if averages else 1.0 / group.size()

    def launch(self, bucket: DenseBucket) -> Pending:
        """Start one all_reduce of the bucket's memory, in place."""
        work: Pending | None = dist.all_reduce(bucket.buffer, op=self._op, group=self._group, async_op=True)
        assert work is not None  # None is for ranks outside the group, and those can't wrap a module
        return work


class SparsePending:
    """The mean of one sparse gradient: all ranks' indices and values, gathered.

    Cost: every rank receives P times the largest number of entries, so it pays only while gradients are really sparse.
    Numerics: summed in the order of ranks; bitwise equal on all ranks.
    """

    def __init__(self, bucket: SparseBucket, grad: Tensor | None, group: dist.ProcessGroup) -> None:
        self._bucket = bucket
        self._group = group
        parameter = bucket.parameters[0]
        if grad is None:  # nothing to contribute, and still the others wait for it
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                check_invariants=False,
            )
        self._grad = grad.coalesce()
        # Straight from memory to memory, where the program waits anyway: in the background it costs a change of
        # threads. Not where ranks may be out of the step: their part in it must be as long as the others'.
        all_here = getattr(group, "_uneven_inputs", None) is None
        self._direct = all_here and parameter.is_cpu and shares_memory(group)
        if self._direct:
            return
        count = torch.tensor([self._grad.values().shape[0]], device=parameter.device)
        self._counts = [torch.empty_like(count) for _ in range(group.size())]
        with training_step(group):
            self._work = dist.all_gather(self._counts, count, group=group, async_op=True)

    def wait(self) -> None:
        """Exchange the entries, once all know how many there are, and leave their mean with the bucket."""
        if self._direct:
            group: Any = self._group
            self._bucket.mean = group.sparse_mean(self._grad)
            return
        assert self._work is not None
        self._work.wait()
        counts = [int(count) for count in self._counts]
        indices = _gather(self._grad.indices().t(), counts, self._group)
        values = _gather(self._grad.values(), counts, self._group)
        values /= self._group.size() - len(absent_ranks(self._group))
        summed = torch.sparse_coo_tensor(indices.t(), values, self._grad.shape, check_invariants=False)
        self._bucket.mean = summed.coalesce()


def _gather(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, one below the other; ranks may have different numbers of them."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in counts]
    with training_step(group):
        dist.all_gather(received, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])
