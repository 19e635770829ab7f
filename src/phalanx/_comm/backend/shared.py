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


def require_member(group: Any, caller: str, argument: str = "process_group") -> None:
    """Check that this rank is in `group`.

    Raises:
        ValueError: this rank is not in `group`; the message names `caller` and its `argument`.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # an integer, which torch's stubs type as a group
        raise ValueError(
            f"{caller}: this rank is not in {argument}: dist.new_group returns no group on ranks outside the group. "
            "Pass each rank a group that contains the rank, as dist.new_subgroups does"
        )


def default_group() -> dist.ProcessGroup | None:
    """Return the default group; None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def require_group(group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return `group`, by default the default group.

    Raises:
        ValueError: this rank is not in `group`.
        RuntimeError: there is no default group.
    """
    if group is not None:
        require_member(group, caller)
        return group
    if (default := default_group()) is None:
        raise RuntimeError(
            f"{caller} needs a process group: call phalanx.init() or torch.distributed.init_process_group() first"
        )
    return default


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` share memory, which the backend's name does not show."""
    return sharing_group(group) is not None


def sharing_group(group: dist.ProcessGroup) -> PhalanxProcessGroup | None:
    """Return our group behind `group` if all its ranks share memory; otherwise None."""
    ours = phalanx_group(group)
    return ours if ours is not None and ours.shares_memory else None


def ranks_by_host(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Return the group ranks on each host of `group`; () if all are on one host, or the group is not ours."""
    ours = phalanx_group(group)
    return () if ours is None else ours.transport.hosts


def is_joining(group: dist.ProcessGroup) -> bool:
    """Return whether this process is alone in `group`, because it replaces a lost rank and has not joined yet."""
    ours = phalanx_group(group)
    return ours is not None and isinstance(ours.transport, RehearsalTransport)


def shared_empty(
    *size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None, owner: int | None = None
) -> Tensor:
    """Return an uninitialised tensor in the group's symmetric memory, at the same offset in every rank's heap.

    With `owner`, a rank of the group, all ranks' tensors are the same memory, in the owner's part of the heap: every
    rank sees the others' writes. Order the writes with barriers, and do not use such a tensor in collectives. `owner`
    requires a group whose ranks share memory.

    Collective: every rank calls it with the same size and dtype. `all_reduce` of a tensor without `owner` copies
        nothing in or out: each rank combines its slice directly from the memory of all ranks. The memory is reused when
        every rank has freed its tensor. On groups across hosts and on other backends this is `torch.empty`.

    Shape: as `torch.empty`: integers or one sequence.
    Cost: two barriers and, on the first call, the mapping of the heap. Pages are allocated on first use.

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
        if owner is not None and is_joining(group):
            return torch.zeros(shape, dtype=dtype, device="cpu")
        if owner is not None:
            raise ValueError(
                f"shared_empty: owner={owner} needs a group of backend 'phalanx' whose ranks are on one host"
            )
        return torch.empty(shape, dtype=dtype, device="cpu")
    if owner is not None and not 0 <= owner < group.size():
        raise ValueError(f"shared_empty: owner={owner} is not a rank of the group, which has {group.size()} ranks")
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return ours.allocate_symmetric(shape, dtype, calling_site(), owner=owner)


def _read_shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape given as integers of any type, or as one sequence of them."""
    if len(size) == 1:
        try:
            return (operator.index(size[0]),)
        except TypeError:  # a sequence
            size = tuple(size[0])
    return tuple(map(operator.index, size))


def host_memory(nbytes: int, group: dist.ProcessGroup) -> dict[int, Tensor]:
    """Return a tensor for each rank of this host, by rank in `group`: this rank writes its own, and reads the others'.

    A rank's memory outlives the rank as long as another rank of its host keeps the tensors. Collective: every rank
    calls this with the same size. The result has no ranks of other hosts; without shared memory it has only this rank's
    own, private memory.

    Shape: `(nbytes,)`, uint8, uninitialised.

    Raises:
        PhalanxError: the heap has no room.
    """
    ours = phalanx_group(group)
    if ours is None or group.size() == 1:
        return {group.rank(): torch.empty(nbytes, dtype=torch.uint8, device="cpu")}
    return ours.allocate_on_host(nbytes, calling_site())
