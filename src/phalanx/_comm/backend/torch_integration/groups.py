"""Register our process groups with torch, and find torch's; no other module uses torch's tables of groups.

The connection between torch and our groups has two directions, both in this module:

    TorchGroup                  our groups derive from it; its `register_with_torch` makes a group known to torch's C++
    phalanx_group(group)        returns our group behind a group of torch

Today both ends are one object, because our group is a subclass of `ProcessGroup`. Another connection (a subclass of
`torch.distributed.BackendBase` behind a plain `ProcessGroup`) would be added only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from phalanx._base.torch_names import find
from phalanx._comm.backend.torch_integration.inner_backend import attach_backend

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group import PhalanxProcessGroup


class TorchGroup(dist.ProcessGroup):
    """A `TorchGroup` is a group that torch accepts as its own; our groups derive from it."""

    def register_with_torch(self, device_types: Sequence[torch.device]) -> None:
        """Register the group with torch's C++ for these devices; called once, at the end of its construction."""
        self._inner_backend = attach_backend(self, device_types)  # C++ does not keep it


def phalanx_group(group: Any) -> PhalanxProcessGroup | None:
    """Return our group behind torch's `group`; None if it has another backend or is not a group."""
    return cast("PhalanxProcessGroup", group) if isinstance(group, TorchGroup) else None


def list_groups() -> list[Any]:
    """Return all groups of this process, of any backend."""
    return list(_listed())


def is_listed(group: Any) -> bool:
    """Return whether torch still has this group, that is, whether it has not been destroyed."""
    return group in _listed()


def store_of(group: Any) -> Any:
    """Return the store, with its prefix, with which torch created the group."""
    return _listed()[group][1]


@dataclass(frozen=True)
class Registration:
    """A `Registration` is a group with its entries in torch's tables."""

    group: Any
    name: Any  # a string; for mypy a type of torch's
    ranks: tuple[int, ...]
    backend: str
    config: str
    tag: str
    tags: tuple[str, ...]


def list_registrations() -> list[Registration]:
    """Return the registration of every group in this process, including the default group."""
    world = _world()
    registrations = []
    for group, (backend, _) in world.pg_map.items():
        numbers = world.pg_group_ranks[group]
        ranks = tuple(sorted(numbers, key=numbers.__getitem__))
        tags = tuple(tag for tag, groups in world.tags_to_pg.items() if any(one is group for one in groups))
        config, tag = world.pg_backend_config[group], world.pg_to_tag[group]
        registrations.append(Registration(group, world.pg_names[group], ranks, backend, config, tag, tags))
    return registrations


def register_again(registration: Registration, store: Any, ranks: Sequence[int]) -> None:
    """Register a group with torch again, with these ranks and this store, after torch has destroyed it."""
    world, group = _world(), registration.group
    world.pg_map[group] = (registration.backend, store)
    world.pg_names[group] = registration.name
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    world.pg_backend_config[group] = registration.config
    world.pg_to_tag[group] = registration.tag
    for tag in registration.tags:
        world.tags_to_pg.setdefault(tag, []).append(group)
    _register_again(registration.name, group)


def count_groups() -> int:
    """Return torch's counter of groups in this process."""
    return int(_world().group_count)


def count_groups_from(number: int) -> None:
    """Raise torch's counter of groups in this process to at least `number`."""
    world = _world()
    world.group_count = max(number, world.group_count)


def reset_group_count() -> None:
    """Reset torch's counter of groups in this process."""
    _world().group_count = 0


def _listed() -> dict[Any, Any]:
    known: dict[Any, Any] = _world().pg_map
    return known


_NO_LIST = "groups cannot be registered again by name or rank: phalanx.elastic does not work"
_register_again: Any = find("torch._C._distributed_c10d._register_process_group", loses=_NO_LIST)


def _world() -> Any:
    """Return torch's tables of groups. They are looked up each time, because torch's own tests replace the object."""
    return find("torch.distributed.distributed_c10d._world", loses=_NO_LIST)
