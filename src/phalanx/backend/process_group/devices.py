"""The process group where tensors may be on other devices: each call goes to the engine of its tensor's device.

    all_reduce(cpu tensor)   ──▶  shared memory, and the engine between hosts
    all_reduce(cuda tensor)  ──▶  a group inside, of the same ranks, over NCCL
    barrier, objects         ──▶  the CPU's way, unless a device is asked for

The group inside is made with the first tensor of its device. At their first collective on it the ranks tell each other
which device each uses, in the CPU's way: who is missing, or uses another's GPU, is told by name and at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.backend.device_backends import DeviceBackend, available, find_device, no_backend_for
from phalanx.backend.dynamo import untraced
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.diagnostics.failure_report import closed

_IDENTITY_BYTES = 128  # of a device, in UTF-8

# What torch calls with tensors first. Names that mean the same are passed on as they come.
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "all_gather_single", "_allgather_base",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "allgather_coalesced", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "alltoall", "all_to_all_single", "alltoall_base",
)  # fmt: skip
_MESSAGES = ("send", "recv", "recv_anysource")


class RoutedProcessGroup(PhalanxProcessGroup):
    """A `PhalanxProcessGroup` in a process with devices that an engine reaches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device_backends = available()
        self._inside: dict[str, Any] = {}
        self._agreed: set[str] = set()
        self._opening = threading.Lock()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(device) for device in self._device_backends)]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        return (
            self._group_inside(kind)._get_backend(device)
            if kind in self._device_backends
            else super()._get_backend(device)
        )

    def _group_inside(self, kind: str) -> Any:
        """The group for the tensors of that type of device; talks to nobody."""
        with self._opening:
            if self._closed:
                raise closed(self._name)
            if kind not in self._inside:
                self._inside[kind] = self._device_backends[kind].open(
                    self._store,
                    self._rank,
                    self._size,
                    timedelta(seconds=self._timeout_s),
                    self._name,
                    self._global_ranks,
                )
            return self._inside[kind]

    def _route(self, device: torch.device, operation: str, *, collective: bool) -> Any:
        """The group that carries tensors on `device`."""
        device_backend = self._device_backends.get(device.type)
        if device_backend is None:
            raise ValueError(no_backend_for(device, operation))
        group = self._group_inside(device.type)
        if collective and device.type not in self._agreed:
            self._agree(device_backend, device, operation)
            self._agreed.add(device.type)
        return group

    def _agree(self, device_backend: DeviceBackend, device: torch.device, operation: str) -> None:
        """Tell all ranks which device this one uses, once.

        Raises:
            ValueError: the ranks' devices do not go together; on every rank.
            DeadlineError, PeerLostError, MismatchError: not every rank came with a tensor of this device.
        """
        mine = torch.zeros(_IDENTITY_BYTES, dtype=torch.uint8)
        identity = device_backend.identify(device).encode()[:_IDENTITY_BYTES]
        mine[: len(identity)] = torch.tensor(list(identity), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self._size)]
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        super().allgather([theirs], [mine], options).wait()
        names = [bytes(block.tolist()).rstrip(b"\0").decode(errors="replace") for block in theirs]
        if problem := device_backend.problem(names):
            raise ValueError(f"{operation} on {device} in group {self._name!r} on rank {self._rank}: {problem}")

    def barrier(self, opts: Any = None) -> dist.Work:
        """Over when every rank has come; with a device (`device_ids`) also what is queued on it."""
        device = getattr(opts, "device", None)
        if device is None or torch.device(device).type not in self._device_backends:
            return super().barrier(opts)
        work: dist.Work = self._route(device, "barrier", collective=True).barrier(opts)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type in self._device_backends:
            self._route(device, "coalescing", collective=False)._start_coalescing(device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if torch.device(device).type in self._device_backends:
            work: dist.Work = self._route(device, "coalescing", collective=False)._end_coalescing(device)
            return work
        return super()._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may take from now on, on every device."""
        super().set_timeout(timeout)
        for group in self._inside.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish what is queued, then leave the group."""
        self._end(lambda group: group.shutdown())
        super().shutdown()

    def abort(self) -> None:
        """Leave the group at once; whoever waits in it gets an error."""
        self._end(lambda group: group.abort())
        super().abort()

    def _end(self, how: Callable[[Any], None]) -> None:
        with self._opening:
            groups = list(self._inside.values())
            self._inside.clear()
        for group in groups:
            how(group)


def _routed(name: str, *, collective: bool) -> Callable[..., dist.Work]:
    here = getattr(PhalanxProcessGroup, name)

    def call(self: RoutedProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        device = find_device(args)
        if device is None:
            work: dist.Work = here(self, *args, **kwargs)
            return work
        carried: dist.Work = getattr(self._route(device, name, collective=collective), name)(*args, **kwargs)
        return carried

    call.__name__, call.__doc__ = name, here.__doc__
    return call


for _name in (*_COLLECTIVES, *_MESSAGES):
    setattr(RoutedProcessGroup, _name, _routed(_name, collective=_name in _COLLECTIVES))
untraced(RoutedProcessGroup)
