"""The one door to torch's machinery of process groups: what ours derive from, and where torch lists those that it has.

A second way by which torch knows a group of ours (`torch.distributed.BackendBase`) is chosen here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from phalanx.backend.torch_integration.inner_backend import attach_backend

GroupBase = dist.ProcessGroup
"""What a group of ours is to torch."""

begin = attach_backend


def list_groups() -> list[Any]:
    """Return every group that torch has in this process, of whatever backend."""
    return list(_listed())


def is_listed(group: Any) -> bool:
    """Return whether torch still has this group: it has not been destroyed."""
    return group in _listed()


def store_of(group: Any) -> Any:
    """Return the store under whose prefix torch made the group."""
    return _listed()[group][1]


def count_groups_anew() -> None:
    """Let the next group that torch makes here be its first, by number."""
    vars(dist.distributed_c10d)["_world"].group_count = 0


def _listed() -> dict[Any, Any]:
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return known
