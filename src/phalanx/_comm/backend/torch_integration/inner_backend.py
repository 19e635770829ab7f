"""Put a `Backend` behind our process group for torch's C++, in versions in which Python can create one (2.14 on).

For its hooks, torch's C++ queries the backends of a group, not the group: name, options, support of abort hooks.
`init_process_group` of torch 2.15 attaches a flight recorder to every group, and so needs a backend. The backend
forwards operations of C++ (`torch.ops.c10d`, and methods of the group that Python cannot override for C++) to our
group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx._base.torch_names import describe_missing, find
from phalanx._comm.backend.torch_integration.hooks import carry_out

_torch: Any = find("torch._C._distributed_c10d", loses="hooks of our groups are not called")

# The methods that torch's C++ calls on a `Backend`, by the names of their Python overrides; our group runs them.
_OPERATIONS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single",
    "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip

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


def attach_backend(group: Any, device_types: Sequence[torch.device]) -> Any:
    """Put a `Backend` behind `group` in C++ for these devices, and return it; the caller must keep a reference.

    It returns None if Python cannot create one.
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
            """Return the group's timeout as torch's own class; the inherited method recurses endlessly (2.14, 2.15)."""
            group = self._group()
            timeout = timedelta() if group is None else group.options._timeout
            return base.Options(self.getBackendName(), timeout)

        def _get_sequence_number_for_group(self) -> int:
            group = self._group()
            return 0 if group is None else group._get_sequence_number_for_group()

    for name in _OPERATIONS:
        setattr(InnerBackend, name, _forwarding(name))
    return InnerBackend


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError(f"{name}: the process group is gone")
        return carry_out(group, name, args)

    forward.__name__ = name
    return forward
