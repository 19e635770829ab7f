"""Allocate tensors in the memory that the ranks of a host share."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.diagnostics.call_sites import calling_site
from phalanx._comm.transport.rehearsal import RehearsalTransport

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group import PhalanxProcessGroup


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` share memory. The backend's name does not tell: hosts may differ."""
    return sharing_group(group) is not None


def sharing_group(group: dist.ProcessGroup) -> PhalanxProcessGroup | None:
    """Return our group behind `group` if all its ranks share memory; else None."""
    ours = phalanx_group(group)
    return ours if ours is not None and ours.shares_memory else None


def ranks_by_host(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of `group` on each of several hosts, as it numbers them; nothing where the group is not ours, or
    its ranks are on one host.
    """
    ours = phalanx_group(group)
    return () if ours is None else ours.transport.hosts


def rehearses(group: dist.ProcessGroup) -> bool:
    """Return whether this process is alone in `group`: it replaces a lost rank, and has not met the others yet."""
    ours = phalanx_group(group)
    return ours is not None and isinstance(ours.transport, RehearsalTransport)


def shared_empty(
    *size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None, owner: int | None = None
) -> Tensor:
    """Return an uninitialised tensor in the group's symmetric memory, at the same offset in every rank's heap.

    With `owner`, a rank of the group, there is one memory for all: every rank's tensor lies in the owner's part of the
    heap, and all ranks see what one of them writes. Order the writes with barriers. Do not use such a tensor in
    collectives. A group that does not share memory has no such tensor.

    Collective: every rank calls it with the same size and dtype. `all_reduce` of a tensor without `owner` copies
    nothing in or out: each rank combines its slice directly from the memory of all ranks. The memory is freed with the
    tensor, and used again when every rank has freed it. On groups across hosts and on other backends this is
    `torch.empty`.

    Shape: as `torch.empty`: integers or one sequence.
    Cost: two synchronizations of the ranks and, the first time, the mapping of the heap. New pages are zero.

    Raises:
        PhalanxError: the heap has no room.
        RuntimeError: there is no process group.
        ValueError: a size is negative; `owner` is not a rank of the group, or the group does not share memory.
    """
    shape = _read_shape(size)
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"shared_empty: negative size in {shape}")
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("shared_empty needs a process group: call phalanx.init() first")
    ours = sharing_group(group)
    if ours is None:
        if owner is not None and rehearses(group):
            return torch.zeros(shape, dtype=dtype)
        if owner is not None:
            raise ValueError(
                f"shared_empty: owner={owner} needs a group of backend 'phalanx' whose ranks are on one host"
            )
        return torch.empty(shape, dtype=dtype)
    if owner is not None and not 0 <= owner < group.size():
        raise ValueError(f"shared_empty: owner={owner} is not a rank of the group, which has {group.size()}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return ours.allocate_symmetric(shape, dtype, calling_site(), owner=owner)


def _read_shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape that integers, of whichever kind, or one sequence of them say."""
    if len(size) == 1:
        try:
            return (operator.index(size[0]),)
        except TypeError:  # a sequence
            size = tuple(size[0])
    return tuple(map(operator.index, size))


def host_memory(nbytes: int, group: dist.ProcessGroup) -> dict[int, Tensor]:
    """Return `nbytes` of memory of each rank of this host, by its rank in `group`: write this rank's, read the others'.

    What a rank has written there outlives it, while another rank of its host holds what it got. All ranks call it, with
    the same size. Ranks of other hosts are not in the result; where no memory is shared, this rank's is private.

    Shape: `(nbytes,)`, uint8, uninitialised.

    Raises:
        PhalanxError: the heap has no room.
    """
    ours = phalanx_group(group)
    if ours is None or group.size() == 1:
        return {group.rank(): torch.empty(nbytes, dtype=torch.uint8)}
    return ours.allocate_on_host(nbytes, calling_site())
