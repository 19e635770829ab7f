"""Register our process groups with torch, and look up torch's groups; no other module uses torch's tables of groups.

The connection between torch and our groups has two directions, both in this module:

    TorchGroup                  our groups derive from it; its `register_with_torch` registers a group with torch's C++
    phalanx_group(group)        returns our group behind a group of torch

Today both ends are one object, because our group is a subclass of `ProcessGroup`. The alternative, a subclass of c10d's
`Backend` behind a plain `ProcessGroup`, would change only this module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from phalanx._base.torch_names import describe_missing, find
from phalanx._comm.backend.overloads import METHODS
from phalanx._comm.backend.torch_integration.hooks import carry_out

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group import PhalanxProcessGroup
    from phalanx._comm.transport.authentication import PickleAuthenticator


class TorchGroup(dist.ProcessGroup):
    """A `TorchGroup` is a group that torch accepts as its own; our groups derive from it."""

    def register_with_torch(self, device_types: Sequence[torch.device]) -> None:
        """Register the group with torch's C++ for these devices; called once, at the end of its construction."""
        self._inner_backend = _attach_backend(self, device_types)  # C++ does not keep it alive


def phalanx_group(group: Any) -> PhalanxProcessGroup | None:
    """Return our group behind torch's `group`; None if it has another backend or is not a group."""
    return cast("PhalanxProcessGroup", group) if isinstance(group, TorchGroup) else None


def pickle_authenticator(group: Any) -> PickleAuthenticator | None:
    """Return this rank's authenticator for the pickles of `group` (by default the default group).

    Return None for other backends' groups, and for a group whose ranks all share memory.
    """
    ours = phalanx_group(dist.group.WORLD if group is None else group)
    return None if ours is None else ours.transport.pickles


def list_groups() -> list[Any]:
    """Return all groups of this process, of any backend."""
    return list(_listed())


def is_listed(group: Any) -> bool:
    """Return whether torch still lists this group: it has not been destroyed."""
    return group in _listed()


def store_of(group: Any) -> Any:
    """Return the store, with its prefix, with which torch created the group."""
    return _listed()[group][1]


@dataclass(frozen=True)
class Registration:
    """A `Registration` is a group with its entries in torch's tables."""

    group: Any
    name: Any  # a string; in torch's stubs a type of its own
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


_NO_LIST = "groups cannot be registered again by name or rank, so phalanx.elastic does not work"
_register_again: Any = find("torch._C._distributed_c10d._register_process_group", loses=_NO_LIST)


def _world() -> Any:
    """Return torch's tables of groups. They are looked up each time, because torch's own tests replace the object."""
    return find("torch.distributed.distributed_c10d._world", loses=_NO_LIST)


# Put a `Backend` behind our process group for torch's C++, in versions in which Python can create one (2.14 and later).
#
# For its hooks, torch's C++ asks a group's backends, not the group, for the name, the options and the support of abort
# hooks. In torch 2.15 `init_process_group` attaches a flight recorder to every group, and so needs a backend. The
# backend forwards calls from C++ (`torch.ops.c10d`, and methods of the group that Python cannot override for C++) to
# our group.

_torch: Any = find("torch._C._distributed_c10d", loses="hooks of Phalanx groups are not called")

_NEEDS = (
    "torch._C._distributed_c10d.Backend",
    "torch._C._distributed_c10d.ProcessGroup.BackendType.CUSTOM",
    "torch._C._distributed_c10d.ProcessGroup._register_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_default_backend",
)


@functools.cache
def can_attach() -> bool:
    """Return whether Python can create a `Backend` behind a group in this torch; up to 2.13 it has no constructor."""
    if any(map(describe_missing, _NEEDS)):
        return False
    try:
        _torch.Backend(0, 1)
    except TypeError:
        return False
    return True


def _attach_backend(group: Any, device_types: Sequence[torch.device]) -> Any:
    """Put a `Backend` behind `group` in C++ for these devices, and return it; the caller must keep a reference.

    Return None if Python cannot create a `Backend`.
    """
    if not can_attach():
        return None
    inner = _inner_class()(group)
    custom = _torch.ProcessGroup.BackendType.CUSTOM
    for device in device_types:
        _torch.ProcessGroup._register_backend(group, device, custom, inner)
    _torch.ProcessGroup._set_default_backend(group, custom)
    return inner


@functools.cache
def _inner_class() -> type[Any]:
    base: Any = _torch.Backend

    class InnerBackend(base):  # type: ignore[misc]
        """An `InnerBackend` forwards torch's C++ calls to our group; it does not keep the group alive."""

        def __init__(self, group: Any) -> None:
            super().__init__(group.rank(), group.size())
            self._group = weakref.ref(group)

        def getBackendName(self) -> str:
            """Return the group's backend name in torch."""
            group = self._group()
            return "phalanx" if group is None else group.getBackendName()

        def rank(self) -> int:
            """Return the group's rank, which `reconnect` may change."""
            group = self._group()
            return int(super().rank() if group is None else group.rank())

        def size(self) -> int:
            """Return the group's size, which `reconnect` may change."""
            group = self._group()
            return int(super().size() if group is None else group.size())

        @property
        def options(self) -> Any:
            """Return the group's timeout in torch's own class; the inherited method recurses forever (2.14, 2.15)."""
            group = self._group()
            timeout = timedelta() if group is None else group.options._timeout
            return base.Options(self.getBackendName(), timeout)

        def _get_sequence_number_for_group(self) -> int:
            group = self._group()
            return 0 if group is None else group._get_sequence_number_for_group()

    for name in METHODS:  # C++ calls these on a `Backend`; our group runs them
        setattr(InnerBackend, name, _forwarding(name))
    return InnerBackend


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError(f"{name}: the process group no longer exists")
        return carry_out(group, name, args)

    forward.__name__ = name
    return forward
