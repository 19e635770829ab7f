"""The one door to torch's machinery of process groups: what ours derive from, and where torch lists those that it has.

A second way by which torch knows a group of ours (`torch.distributed.BackendBase`) is chosen here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

from phalanx.backend.torch_integration.inner_backend import attach_backend

GroupBase = dist.ProcessGroup
"""The class of torch from which our groups derive."""

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


@dataclass(frozen=True)
class Registration:
    """A group, and what torch has noted of it."""

    group: Any
    name: Any  # a string; for mypy a type of torch's
    ranks: tuple[int, ...]
    backend: str
    config: str
    tag: str
    tags: tuple[str, ...]


def list_registrations() -> list[Registration]:
    """Return what torch has noted of every group in this process, the default one among them."""
    noted = dist.distributed_c10d._world
    registrations = []
    for group, (backend, _) in noted.pg_map.items():
        numbers = noted.pg_group_ranks[group]
        ranks = tuple(sorted(numbers, key=numbers.__getitem__))
        tags = tuple(tag for tag, groups in noted.tags_to_pg.items() if any(one is group for one in groups))
        config, tag = noted.pg_backend_config[group], noted.pg_to_tag[group]
        registrations.append(Registration(group, noted.pg_names[group], ranks, backend, config, tag, tags))
    return registrations


def register_again(registration: Registration, store: Any, ranks: Sequence[int]) -> None:
    """Have torch know a group again, of these ranks and over this store, after the default group took it along."""
    noted, group = dist.distributed_c10d._world, registration.group
    noted.pg_map[group] = (registration.backend, store)
    noted.pg_names[group] = registration.name
    noted.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    noted.pg_backend_config[group] = registration.config
    noted.pg_to_tag[group] = registration.tag
    for tag in registration.tags:
        noted.tags_to_pg.setdefault(tag, []).append(group)
    _register_process_group(registration.name, group)


def count_groups() -> int:
    """Return how many groups torch has numbered in this process."""
    return int(dist.distributed_c10d._world.group_count)


def count_groups_from(number: int) -> None:
    """Let the next group that torch makes here have this number at least."""
    noted = dist.distributed_c10d._world
    noted.group_count = max(number, noted.group_count)


def count_groups_anew() -> None:
    """Let the next group that torch makes here be its first, by number."""
    vars(dist.distributed_c10d)["_world"].group_count = 0


def _listed() -> dict[Any, Any]:
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return known
