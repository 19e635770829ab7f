"""all_reduce of sparse COO tensors: gather everybody's entries, then add them up in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.backend.across_hosts import AcrossHosts
from phalanx.backend.carriers import nobody_carries
from phalanx.backend.mpi.operations import OverMpi
from phalanx.backend.shared_memory import SharedMemory, Span


def check(tensor: Tensor, op: Any) -> None:
    """Only sums of CPU tensors: what else would the missing entries be?"""
    if getattr(op, "op", op) != ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse tensors can only be summed, not reduced with {op}")
    if tensor.device.type != "cpu":
        raise ValueError(nobody_carries(tensor.device, "all_reduce"))


def all_reduce(memory: SharedMemory | AcrossHosts | OverMpi, tensor: Tensor, span: Span) -> None:
    """`tensor` becomes the sum over ranks, coalesced.

    Shape: the same on every rank, with the same number of sparse dimensions; the number of entries may differ.
    Cost: three gathers; every rank holds all ranks' entries for a moment.
    """
    world_size = memory.world_size
    mine = tensor.coalesce()
    count = torch.tensor([mine._nnz()])
    counts = torch.empty(world_size, dtype=torch.int64)
    memory.all_gather_single(counts, count, span)
    sizes = [int(n) for n in counts]
    indices = [torch.empty((n, mine.sparse_dim()), dtype=torch.int64) for n in sizes]
    values = [torch.empty((n, *mine.shape[mine.sparse_dim() :]), dtype=mine.dtype) for n in sizes]
    memory.gather(indices, mine.indices().t().contiguous(), span)
    memory.gather(values, mine.values(), span)
    total = torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
