"""Run collectives and messages of device tensors through host memory, if no engine supports the device.

    all_reduce(device tensor) ──▶ the host's tensor ──▶ all_reduce(cpu tensor) ──▶ the device tensor

The operation is a CPU operation, with its checks, errors, fingerprint and order. Copies to and from the device are
queued on a separate stream; `transport/staging` describes their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx._comm.backend.arguments import device_allowed
from phalanx._comm.backend.device_backends import no_backend_for
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.memoryless import FakeCall, address_of, check_memory, work_of_fake_call
from phalanx._comm.backend.process_group import PhalanxProcessGroup
from phalanx._comm.backend.work import CompletedWork, PhalanxWork
from phalanx._comm.diagnostics.call_sites import calling_site
from phalanx._comm.diagnostics.failure_report import closed
from phalanx._comm.transport.staging import CopyStream, HostMemory, StagedCall, open_copy_stream
from phalanx._comm.transport.staging.host_memory import staging_bytes
from phalanx._comm.transport.staging.staged_call import StagedTensors
from phalanx.errors import PhalanxError

_PATIENCE_S = 5.0
MESSAGES = ("send", "recv", "recv_anysource")
# The first argument of these methods is both input and output; in all others, outputs precede inputs.
_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})


class _CurrentCall(threading.local):
    """A `_CurrentCall` holds each thread's current operation on device tensors."""

    call: StagedCall | None = None


class DeviceStaging:
    """A `DeviceStaging` runs a group's operations on device tensors through host memory."""

    def __init__(self) -> None:
        self.current = _CurrentCall()
        """The current operation of each thread on device tensors."""
        self._host_memory: dict[str, HostMemory] = {}
        self._copy_streams: dict[torch.device, tuple[CopyStream, StagedTensors]] = {}
        self._opening = threading.Lock()

    def open_host_memory(self, group: PhalanxProcessGroup, kind: str) -> None:
        """Open the host memory for this type of device. All ranks call this if they share memory."""
        piece = None
        if group.shares_memory and group.members.size > 1:
            nbytes = staging_bytes(group.symm_mem.heap_bytes)
            try:
                piece = group.allocate_symmetric((nbytes,), torch.uint8, calling_site())
            except PhalanxError:  # the memory's file system may be full; all ranks get this error
                piece = None
        self._host_memory[kind] = HostMemory(kind, piece)

    def _stream_of(self, device: torch.device) -> tuple[CopyStream, StagedTensors]:
        if device not in self._copy_streams:
            stream = open_copy_stream(device)
            self._copy_streams[device] = stream, StagedTensors(stream)
        return self._copy_streams[device]

    def _new_call(self, group: PhalanxProcessGroup, device: torch.device) -> StagedCall:
        with self._opening:
            if group.closed:
                raise closed(group.group_name)
            stream, in_flight = self._stream_of(device)
            if device.type not in self._host_memory:  # a message may precede collectives
                self._host_memory[device.type] = HostMemory(device.type)
            return StagedCall(stream, self._host_memory[device.type], in_flight)

    def await_device(self, group: PhalanxProcessGroup, device: torch.device) -> None:
        """Wait until the work that this thread has queued on the device has completed."""
        stream = self._new_call(group, device).stream
        stream.await_on_host(stream.mark())

    def carry_out(
        self,
        group: PhalanxProcessGroup,
        name: str,
        here: Callable[..., dist.Work],
        device: torch.device,
        args: tuple[Any, ...],
    ) -> dist.Work:
        """Run the CPU operation `here` on tensors of a device that no engine supports."""
        call = self._new_call(group, device)
        try:
            staged = _stage(call, group.members.rank, name, device, args)
            return self._carry(group, call, name, device, here, staged)
        except FakeCall:
            return work_of_fake_call(name, args)
        except BaseException:
            call.abandon()
            raise

    def _carry(
        self,
        group: PhalanxProcessGroup,
        call: StagedCall,
        name: str,
        device: torch.device,
        here: Callable[..., dist.Work],
        staged: tuple[Any, ...],
    ) -> dist.Work:
        if name in MESSAGES:
            if name != "send":
                return StagedReceive(here(group, *staged), call)
            call.await_inputs()
            return here(group, *staged)
        outputs = call.outputs
        self.current.call = call
        try:
            with device_allowed(device):
                work = here(group, *staged)
        finally:
            self.current.call = None
        if isinstance(work, CompletedWork):
            call.order_caller()
            return StagedCompletedWork(call, outputs)
        return work

    def close(self) -> None:
        """Release the host memory. No operation of the group may be running."""
        # A device may still copy from and to the memory, for operations that nobody waited for.
        idle = all([stream.drain(_PATIENCE_S) for stream, _ in self._copy_streams.values()])
        if idle:
            for memory in self._host_memory.values():
                memory.close()
        self._copy_streams.clear()
        self._host_memory.clear()


def _stage(call: StagedCall, rank: int, name: str, device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
    if name in MESSAGES:
        return staged(first, read=name == "send", written=name != "send"), *rest
    if name in _IN_PLACE:
        root = -1 if name.startswith("allreduce") else rest[0].rootRank
        read = name != "broadcast" or root == rank
        written = root in (-1, rank) if name != "broadcast" else root != rank
        return staged(first, read=read, written=written), *rest
    second, rest = rest[0], rest[1:]
    return staged(first, read=False, written=True), staged(second, read=True, written=False), *rest


@untraced
class StagedWork(PhalanxWork):
    """A `StagedWork` is the work of a collective on device tensors that runs in the background.

    `wait` returns when the CPU operation has completed, and raises its error. Copies back to the device may still be
    queued: the caller's stream waits for them, as with NCCL. Futures hold the device's tensors.
    """

    def __init__(self, call: StagedCall) -> None:
        super().__init__(call.outputs)
        self._call = call

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the CPU operation has completed; operations that the caller queues afterwards see the results."""
        over = super().wait(timeout)
        self._call.order_caller()
        return over

    def is_completed(self) -> bool:
        """Return whether the operation has ended; what the caller queues afterwards sees the results."""
        over = super().is_completed()
        if over:
            self._call.order_caller()
        return over

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=self._call.stream.future_devices)

    def fulfil(self, future: torch.futures.Future[Any], outputs: list[Any]) -> None:
        with self._call.stream.queueing():  # so that callbacks, and waiters of the future, run after the copies
            super().fulfil(future, outputs)


@untraced
class StagedCompletedWork(CompletedWork):
    """A `StagedCompletedWork` is the work of a collective that was complete when its call returned."""

    def __init__(self, call: StagedCall, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._call = call

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return True, and make the calling thread's current stream wait for the copies."""
        self._call.order_caller()
        return True

    def is_completed(self) -> bool:
        """Return True, and make the calling thread's current stream wait for the copies."""
        return self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._call.stream.future_devices)
        with self._call.stream.queueing():
            future.set_result(self.result())
        return future


@untraced
class StagedReceive(dist.Work):
    """A `StagedReceive` receives into host memory; a wait or poll copies the message to the device."""

    def __init__(self, work: Any, call: StagedCall) -> None:
        super().__init__()
        self._work = work
        self._call = call
        self._outputs = call.outputs
        self._copying = threading.Lock()
        self._copied = False

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the message has arrived; the caller's stream waits for its copy to the device."""
        self._work.wait(timeout) if timeout is not None else self._work.wait()
        self._copy()
        self._call.order_caller()
        return True

    def synchronize(self) -> None:
        """Block as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the receive has completed, successfully or not."""
        over: bool = self._work.is_completed()
        if over and self._work.is_success():
            self._copy()
            self._call.order_caller()  # a caller that polls uses the tensor without calling `wait`
        return over

    def is_success(self) -> bool:
        """Return whether the receive has completed successfully."""
        return self.is_completed() and bool(self._work.is_success())

    def exception(self) -> Any:
        """Return the receive's error, if any."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Wait for the message, and return a list with the tensor."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        rank: int = self._work.source_rank()
        return rank

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is a list with the tensor, on its device."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._call.stream.future_devices)

        def on_complete(received: torch.futures.Future[Any]) -> None:
            try:
                received.value()
                self._copy()
            except Exception as error:
                future.set_exception(error)
                return
            with self._call.stream.queueing():
                future.set_result(self._outputs)

        self._work.get_future().add_done_callback(on_complete)
        return future

    def _copy(self) -> None:
        with self._copying:
            if not self._copied:
                self._call.write_back()
                self._copied = True
