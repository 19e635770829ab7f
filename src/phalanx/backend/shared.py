"""Tensors in the memory that the ranks of a host share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.deadline import Deadline
from phalanx.diagnostics.call_sites import calling_site
from phalanx.transport.shares_memory import shares_memory


def shared_empty(
    *size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None, owner: int | None = None
) -> Tensor:
    """An uninitialised tensor in the group's symmetric memory, at the same place of every rank's heap.

    With `owner`, a rank of the group, it is one memory for all: every rank's tensor lies in the owner's piece of the
    heap, and what one rank writes all others see. Order the writes with barriers; collectives are for the other kind.
    A group that does not share memory has no such tensor.

    Collective: every rank calls it with the same size and dtype. `all_reduce` of such a tensor copies nothing in or
    out: each rank combines its slice straight from everybody's memory. The memory is let go with the tensor, and used
    anew when every rank has let go. On groups across hosts and of another backend this is `torch.empty`.

    Shape: as `torch.empty`: integers or one sequence.
    Cost: two gates and, the first time, the mapping of the heap. New pages are zero.

    Raises:
        PhalanxError: the heap has no room.
        RuntimeError: there is no process group.
        ValueError: a size is negative; `owner` is not a rank of the group, or the group does not share memory.
    """
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"shared_empty: negative size in {shape}")
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("shared_empty needs a process group: call phalanx.init() first")
    shared = shares_memory(group)
    if owner is not None and not shared:
        raise ValueError(f"shared_empty: owner={owner} needs a group of backend 'phalanx' whose ranks are on one host")
    if owner is not None and not 0 <= owner < group.size():
        raise ValueError(f"shared_empty: owner={owner} is not a rank of the group, which has {group.size()}")
    if not shared or count == 0:
        return torch.empty(shape, dtype=dtype)
    return _allocate(group, shape, dtype, owner, calling_site())


def _allocate(
    group: Any, shape: tuple[int, ...], dtype: torch.dtype, owner: int | None, place: tuple[str, int]
) -> Tensor:
    from phalanx.transport.shared_memory import (
        CallContext,  # not at the top: it needs the C core, which may not be there
    )

    memory = group._memory
    ctx = CallContext(group._timeout_s, memory.site(place))
    nbytes = math.prod(shape) * dtype.itemsize

    def allocate() -> Tensor:
        if memory.uneven is not None:
            memory.barrier(ctx)  # where all meet again, if some were out of training steps
        deadline = Deadline.after(group._timeout_s)
        with memory.turn(group._timeout_s):
            buffer = memory.symm_mem.allocate(
                nbytes, deadline, ctx.site, lambda status: memory.check(status, ctx), owner=owner
            )
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    allocated: Tensor = group.in_order(allocate)
    return allocated
