"""A process group for tensors of all devices: each call goes to the engine for its tensor's device.

    all_reduce(cpu tensor)   ──▶  shared memory, and the engine between hosts
    all_reduce(cuda tensor)  ──▶  an inner group of the same ranks, over NCCL; or, if ranks share a GPU, which NCCL
                                  refuses, through host memory: `process_group/staged`
    barrier, objects         ──▶  as CPU tensors, unless a device is given

The first tensor on a type of device creates the inner group. In the first collective on that type, the ranks exchange
their devices over the CPU's transport, so that a missing rank is reported there and all ranks choose the same engine.
Collectives through host memory are CPU collectives: same order, fingerprint and errors, and bitwise identical results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.backend.device_backends import DeviceBackend, available, find_device, no_backend_for
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.overloads import METHODS, OLDER_NAMES, first_form
from phalanx._comm.backend.process_group import PhalanxProcessGroup
from phalanx._comm.backend.process_group.staged import MESSAGES, DeviceStaging, StagedWork
from phalanx._comm.backend.rendezvous import ranks_share_gpus
from phalanx._comm.backend.work import PhalanxWork, SerialExecutor
from phalanx._comm.diagnostics.failure_report import closed
from phalanx._comm.transport.base import CallContext

c10d: Any = dist.distributed_c10d  # its stubs lack names used here

_IDENTITY_BYTES = 128  # a device's identifier (UTF-8) is cut or padded to this length
# the tag of the messages in which two ranks exchange their devices; PyTorch's tags are never negative
_IDENTITY_TAG = -(1 << 20)

_logger = get_logger(__name__)


class _CachedAnswer:
    """A `_CachedAnswer` calls a function once, in the first thread that needs the result, and caches the result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer: bool | None = None

    def get(self, compute: Callable[[], bool]) -> bool:
        """Return the result of the first call of `compute`."""
        with self._lock:
            if self._answer is None:
                self._answer = compute()
            return self._answer


class RoutedProcessGroup(PhalanxProcessGroup):
    """A `RoutedProcessGroup` is a `PhalanxProcessGroup` in a process with devices that an engine supports."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._device_backends = available()  # first, because creating a group reads its devices
        super().__init__(*args, **kwargs)
        self._staging = DeviceStaging()
        self._opening = threading.Lock()
        self._inside: dict[str, Any] = {}
        self._agreed: set[str] = set()
        self._comparing = threading.Lock()
        self._one_device: dict[tuple[str, int], _CachedAnswer] = {}  # keyed by type of device and rank
        self._identities: dict[str, list[dist.Work]] = {}  # the messages with this rank's device, by type of device
        self._staged: set[str] = set()  # types of device whose tensors go through host memory

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(device) for device in self._device_backends)]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind in self._device_backends:
            return self if self._is_staged(kind) else self._group_inside(kind)._get_backend(device)
        return super()._get_backend(device)

    def leave_members(self, patience_s: float, **how: bool) -> None:
        self._close_inside(lambda group: group.abort())
        self._agreed.clear()  # other members may use other devices
        self._staged.clear()
        self._one_device.clear()
        self._identities.clear()
        super().leave_members(patience_s, **how)

    def _group_inside(self, kind: str) -> Any:
        """Return the inner group for tensors of that type of device; this sends nothing."""
        with self._opening:
            if self.closed:
                raise closed(self.group_name)
            if kind not in self._inside:
                opened = self._device_backends[kind].open
                assert opened is not None
                self._inside[kind] = opened(
                    self.get_group_store(),
                    self.members.rank,
                    self.members.size,
                    timedelta(seconds=self.timeout_s),
                    self.group_name,
                    self.members.global_ranks,
                )
            return self._inside[kind]

    def _is_staged(self, kind: str) -> bool:
        """Return whether tensors of that type of device go through the host, as far as this rank knows."""
        return kind in self._staged or self._device_backends[kind].open is None or ranks_share_gpus()

    def _route(self, device: torch.device, operation: str, *, collective: bool) -> Any:
        """Return the group for tensors on `device`; None if they go through the host."""
        device_backend = self._device_backend(device, operation)
        if collective and device.type not in self._agreed:
            self._agree(device_backend, device)
            self._agreed.add(device.type)
        return None if self._is_staged(device.type) else self._group_inside(device.type)

    def _route_message(self, device: torch.device, operation: str, args: tuple[Any, ...]) -> Any:
        """Return the group for a message, as `_route` does. There may have been no collective on this device yet."""
        self._device_backend(device, operation)
        compares = self.shares_memory and not (self._is_staged(device.type) or device.type in self._agreed)
        if compares:
            self._publish_device(device)
            # NCCL has no any-source receive, so this receive goes through host memory.
            if operation == "recv_anysource" or self._use_one_device(device, args[1]):
                return None
        return self._route(device, operation, collective=False)

    def _device_backend(self, device: torch.device, operation: str) -> DeviceBackend:
        device_backend = self._device_backends.get(device.type)
        if device_backend is None:
            raise ValueError(no_backend_for(device, operation))
        return device_backend

    def _publish_device(self, device: torch.device) -> None:
        """Send this rank's device to all peers, once. If it were sent on demand, a ring of ranks would deadlock."""
        with self._comparing:
            if device.type in self._identities:
                return
            sent = self._identities[device.type] = []
        mine = self._identity(device)
        for peer in range(self.members.size):
            if peer != self.members.rank:
                sent.append(PhalanxProcessGroup.send(self, [mine], peer, _IDENTITY_TAG))

    def _identity(self, device: torch.device) -> torch.Tensor:
        identity = self._device_backends[device.type].identify(device).encode()[:_IDENTITY_BYTES]
        return torch.tensor(list(identity.ljust(_IDENTITY_BYTES, b"\0")), dtype=torch.uint8, device="cpu")

    def _use_one_device(self, device: torch.device, peer: int) -> bool:
        """Return whether `peer` uses this rank's device. Each rank sends its device before its first device message."""
        with self._comparing:
            answer = self._one_device.setdefault((device.type, peer), _CachedAnswer())

        def compare() -> bool:
            theirs = torch.empty(_IDENTITY_BYTES, dtype=torch.uint8, device="cpu")
            PhalanxProcessGroup.recv(self, [theirs], peer, _IDENTITY_TAG).wait()
            return torch.equal(self._identity(device), theirs)

        return answer.get(compare)

    def _agree(self, device_backend: DeviceBackend, device: torch.device) -> None:
        """Exchange all ranks' devices, and choose the same engine for the device's tensors on all ranks.

        Raises:
            DeadlineError, PeerLostError, MismatchError: not every rank called with a tensor of this device.
        """
        gathered = self._all_gather_bytes(device_backend.identify(device).encode(), _IDENTITY_BYTES)
        names = [name.decode(errors="replace") for name in gathered]
        obstacle = device_backend.obstacle(names)
        if obstacle or self._is_staged(device.type):
            if obstacle and self.members.rank == 0 and not ranks_share_gpus():
                warn_once(
                    _logger,
                    f"group {self.group_name!r}: {obstacle}\nTensors on {device.type} go through memory that these "
                    "ranks share. If ranks should not share a GPU, call torch.cuda.set_device(local_rank) first, or "
                    "start at most one rank per GPU. If they should, pass --ranks-per-gpu to `phalanx run`.",
                )
            self._staging.open_host_memory(self, device.type)
            self._staged.add(device.type)

    def _all_gather_bytes(self, mine: bytes, nbytes: int) -> list[bytes]:
        """Return each rank's bytes, at most `nbytes`, without trailing zeros, by rank. All ranks call it.

        Raises:
            DeadlineError, PeerLostError, MismatchError: not every rank called it.
        """
        sent = torch.tensor(list(mine[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8, device="cpu")
        theirs = [torch.empty_like(sent) for _ in range(self.members.size)]
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        PhalanxProcessGroup.allgather(self, [theirs], [sent], options).wait()
        return [bytes(one.tolist()).rstrip(b"\0") for one in theirs]

    def is_free(self) -> bool:
        return self._staging.current.call is None and super().is_free()

    def carry_out(self, operation: Callable[[CallContext], None], options: Any, outputs: Any) -> dist.Work:
        call = self._staging.current.call
        if call is not None:
            operation = call.around(operation)
        return super().carry_out(operation, options, outputs)

    def enqueue(self, executor: SerialExecutor, action: Callable[[], None], outputs: Any) -> PhalanxWork:
        call = self._staging.current.call
        if call is None or executor is not self.executor:
            return super().enqueue(executor, action, outputs)
        work = StagedWork(call)
        self.recent_works.append(work)
        return executor.put(action, work)

    def release_memory(self) -> None:
        self._staging.close()

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Return a work that completes when every rank has called this.

        With `device_ids`, the work that is queued on that device has completed by then, too.
        """
        (opts,) = first_form("barrier", args, kwargs)
        device = getattr(opts, "device", None)
        if device is None or torch.device(device).type not in self._device_backends:
            work: dist.Work = super().barrier(opts)
            return work
        group = self._route(device, "barrier", collective=True)
        if group is None:
            self._staging.await_device(self, device)
            work = super().barrier(opts)
        else:
            work = group.barrier(opts)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if (group := self._coalescing_group(device)) is not None:
            group._start_coalescing(device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if (group := self._coalescing_group(device)) is not None:
            work: dist.Work = group._end_coalescing(device)
            return work
        return super()._end_coalescing(device)

    def _coalescing_group(self, device: torch.device) -> Any:
        if torch.device(device).type not in self._device_backends:
            return None
        return self._route(torch.device(device), "coalescing", collective=False)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations from now on, on every device."""
        super().set_timeout(timeout)
        for group in self._inside.values():
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._close_inside(lambda group: group.shutdown())
        super().shutdown()

    def abort(self) -> None:
        self._close_inside(lambda group: group.abort())
        super().abort()

    def _close_inside(self, how: Callable[[Any], None]) -> None:
        with self._opening:
            groups = list(self._inside.values())
            self._inside.clear()
        for group in groups:
            how(group)


def _routed(name: str, *, collective: bool) -> Callable[..., dist.Work]:
    here = getattr(PhalanxProcessGroup, name)

    def call(self: RoutedProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        args = first_form(name, args, kwargs)
        device = find_device(args)
        if device is None:
            work: dist.Work = here(self, *args)
            return work
        group = self._route(device, name, collective=True) if collective else self._route_message(device, name, args)
        if group is None:
            return self._staging.carry_out(self, name, here, device, args)
        carried: dist.Work = getattr(group, name)(*args)
        return carried

    call.__name__, call.__doc__ = name, here.__doc__
    return call


for _name in (*METHODS, *OLDER_NAMES.values()):
    if _name != "barrier":  # the first arguments of all other methods are tensors
        setattr(RoutedProcessGroup, _name, _routed(_name, collective=_name not in MESSAGES))
untraced(RoutedProcessGroup)
