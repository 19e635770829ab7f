"""Collectives and messages of a device's tensors through the host's memory, in the CPU's order and with its errors.

    all_reduce(device tensor) ──▶ the host's tensor ──▶ all_reduce(cpu tensor) ──▶ the device tensor

The operation is the CPU's own, on staged tensors: its checks at the door, its fingerprint, its place among the others.
Copies are queued on a stream of their own; `transport/staging` says in which order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend.device_backends import no_backend_for
from phalanx.backend.memoryless import FakeCall, address_of, check_memory, nothing_done
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.backend.staged_work import StagedDone, StagedReceive, StagedWork
from phalanx.backend.work import DoneWork, PhalanxWork, SerialExecutor
from phalanx.diagnostics.call_sites import calling_site
from phalanx.diagnostics.failure_report import closed
from phalanx.errors import PhalanxError
from phalanx.transport.base import CallContext
from phalanx.transport.staging import CopyStream, HostMemory, StagedCall, open_copy_stream
from phalanx.transport.staging.host_memory import staging_bytes
from phalanx.transport.staging.staged_call import InFlight

_PATIENCE_S = 5.0
_MESSAGES = ("send", "recv", "recv_anysource")
# Those whose first argument is both read and written; the others have their outputs first and their inputs second.
_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})


class _Calling(threading.local):
    """The staged operation that this thread is calling."""

    call: StagedCall | None = None


class StagedProcessGroup(PhalanxProcessGroup):
    """A `PhalanxProcessGroup` that can carry tensors of devices as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host_memory: dict[str, HostMemory] = {}
        self._copy_streams: dict[torch.device, tuple[CopyStream, InFlight]] = {}
        self._calling = _Calling()
        self._opening = threading.Lock()

    def _open_host_memory(self, kind: str) -> None:
        """Open the host's memory for this kind of device. Collective, where ranks share memory."""
        piece = None
        if self.shares_memory and self._size > 1:
            nbytes = staging_bytes(self.symm_mem.heap_bytes)
            try:
                piece = self.allocate_symmetric((nbytes,), torch.uint8, calling_site())
            except PhalanxError:  # of memory that lies in a file system there is not as much; on all ranks
                piece = None
        self._host_memory[kind] = HostMemory(kind, piece)

    def _new_call(self, device: torch.device) -> StagedCall:
        with self._opening:
            if self._closed:
                raise closed(self._name)
            if device.type not in self._host_memory:  # messages come first: what they need is nobody else's matter
                self._host_memory[device.type] = HostMemory(device.type)
            if device not in self._copy_streams:
                stream = open_copy_stream(device)
                self._copy_streams[device] = stream, InFlight(stream)
            stream, in_flight = self._copy_streams[device]
            return StagedCall(stream, self._host_memory[device.type], in_flight)

    def _await_device(self, device: torch.device) -> None:
        """Return when all is over that this thread has queued there."""
        stream = self._new_call(device).stream
        stream.await_on_host(stream.mark())

    def _through_host(
        self, name: str, here: Callable[..., dist.Work], device: torch.device, args: tuple[Any, ...]
    ) -> dist.Work:
        """Return the operation `here` of the CPU, with the device's tensors staged in the host's memory."""
        call = self._new_call(device)
        try:
            staged = self._stage(call, name, device, args)
            return self._carry(call, name, here, staged)
        except FakeCall:
            return nothing_done(name, args)
        except BaseException:
            call.abandon()
            raise

    def _carry(self, call: StagedCall, name: str, here: Callable[..., dist.Work], staged: tuple[Any, ...]) -> dist.Work:
        if name == "send":
            call.await_inputs()
            return here(self, *staged)
        if name in _MESSAGES:
            return StagedReceive(here(self, *staged), call)
        outputs = call.outputs
        self._calling.call = call
        try:
            work = here(self, *staged)
        finally:
            self._calling.call = None
        if isinstance(work, DoneWork):
            call.order_caller()
            return StagedDone(call, outputs)
        return work

    def _stage(self, call: StagedCall, name: str, device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
        def staged(value: Any, *, read: bool, written: bool) -> Any:
            if isinstance(value, (list, tuple)):
                return [staged(item, read=read, written=written) for item in value]
            if not isinstance(value, torch.Tensor):
                return value
            if value.device != device:
                raise ValueError(no_backend_for(device, name, other=value.device))
            if value.layout is torch.strided and not address_of(value):
                check_memory(value, name, written=written)
            return call.stage(value, read=read, written=written)

        first, rest = args[0], args[1:]
        if name in _MESSAGES:
            return staged(first, read=name == "send", written=name != "send"), *rest
        if name in _IN_PLACE:
            root = -1 if name.startswith("allreduce") else rest[0].rootRank
            read = name != "broadcast" or root == self._rank
            written = root in (-1, self._rank) if name != "broadcast" else root != self._rank
            return staged(first, read=read, written=written), *rest
        second, rest = rest[0], rest[1:]
        return staged(first, read=False, written=True), staged(second, read=True, written=False), *rest

    def _is_free(self) -> bool:
        return self._calling.call is None and super()._is_free()

    def _carry_out(self, operation: Callable[[CallContext], None], options: Any, outputs: Any) -> dist.Work:
        call = self._calling.call
        return super()._carry_out(operation if call is None else call.around(operation), options, outputs)

    def _queue(self, executor: SerialExecutor, action: Callable[[], None], outputs: Any) -> PhalanxWork:
        call = self._calling.call
        if call is None or executor is not self._executor:
            return super()._queue(executor, action, outputs)
        work = StagedWork(call)
        self._recent.append(work)
        return executor.put(action, work)

    def _let_memory_go(self) -> None:
        # A device may still copy from and to it: what was called and never waited for.
        idle = all([stream.drain(_PATIENCE_S) for stream, _ in self._copy_streams.values()])
        for memory in self._host_memory.values() if idle else ():
            memory.close()
        self._copy_streams.clear()
        self._host_memory.clear()
