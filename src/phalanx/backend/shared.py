"""Tensors in the memory that the ranks of a host share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.shared_memory import SharedMemory, Span
from phalanx.backend.sites import calling_site
from phalanx.deadline import Deadline


def shared_empty(*size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """An uninitialised tensor in the group's arena, at the same place of every rank's heap.

    Collective: every rank calls it with the same size and dtype. `all_reduce` of such a tensor copies nothing in or
    out: each rank combines its slice straight from everybody's memory. The memory is let go with the tensor, and used
    anew when every rank has let go. On groups across hosts and of another backend this is `torch.empty`.

    Shape: as `torch.empty`: integers or one sequence.
    Cost: two gates and, the first time, the mapping of the heap. New pages are zero.

    Raises:
        PhalanxError: the heap has no room.
    """
    from phalanx.backend.process_group import PhalanxProcessGroup

    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"shared_empty: negative size in {shape}")
    group = group if group is not None else dist.group.WORLD
    memory = group._memory if isinstance(group, PhalanxProcessGroup) else None
    if not isinstance(memory, SharedMemory) or count == 0:
        return torch.empty(shape, dtype=dtype)
    assert isinstance(group, PhalanxProcessGroup)
    span = Span(group._timeout_s, memory.site(calling_site()))
    nbytes = count * dtype.itemsize
    with memory.lock:
        buffer = memory.arena.allocate(
            nbytes, Deadline.after(group._timeout_s), span.site, lambda status: memory.check(status, span)
        )
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
