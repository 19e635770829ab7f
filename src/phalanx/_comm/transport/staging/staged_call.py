"""A `StagedCall` is one operation on device tensors: staged in host memory, run there, and written back.

caller                              the thread that runs the operation           caller
read: device to host is queued ──▶  await the copy, run it, queue the        ──▶ its stream waits for the copies
                                    copies back; an error: nothing is copied
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.staging.host_memory import HostMemory
from phalanx._comm.transport.staging.streams import CopyStream

Operation = Callable[[CallContext], None]


class StagedTensors:
    """`StagedTensors` keeps alive the host tensors that the device still reads or writes."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._held: deque[tuple[Any, list[Tensor]]] = deque()

    def hold(self, mark: Any, tensors: list[Tensor]) -> None:
        """Keep `tensors` alive at least until the work before `mark` is complete."""
        while self._held and self._stream.is_over(self._held[0][0]):
            self._held.popleft()
        self._held.append((mark, tensors))


class StagedCall:
    """A `StagedCall` has the tensors of one operation, on the device and on the host."""

    def __init__(self, stream: CopyStream, memory: HostMemory, in_flight: StagedTensors) -> None:
        self.stream = stream
        self._memory = memory
        self._in_flight = in_flight
        self._written: list[tuple[Tensor, Tensor]] = []
        self._arriving: list[Tensor] = []  # the device writes to these until a thread has waited for the copies
        self._read_mark: Any = None
        self._done_mark: Any = None
        stream.follow_caller()

    @property
    def outputs(self) -> list[Tensor]:
        """Return the device's tensors whose results have not been copied back yet."""
        return [tensor for tensor, _ in self._written]

    def stage(self, tensor: Tensor, *, read: bool, written: bool) -> Tensor:
        """Return the host's tensor for `tensor`; if `read`, it holds the elements once `await_inputs` returns.

        If `written`, `write_back` copies it to the device.
        """
        if tensor.layout is not torch.strided:  # a sparse tensor's sizes are known only once the device has computed it
            host = tensor.detach().cpu()
        elif any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)) and written:
            # The caller's check will refuse the tensor, with an error that names its strides.
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            host = self._memory.empty(tensor.shape, tensor.dtype)
            if read and tensor.numel():
                with self.stream.queueing(), torch.no_grad():
                    host.copy_(tensor.detach(), non_blocking=True)
                self.stream.keep(tensor)
                self._arriving.append(host)
        if read:
            self._read_mark = self.stream.mark()
        if written:
            self._written.append((tensor, host))
        return host

    def around(self, operation: Operation) -> Operation:
        """Return a function that runs `operation` on the host's tensors, between the copies to the host and back."""

        def carry_out(ctx: CallContext) -> None:
            self.await_inputs()
            operation(ctx)
            self.write_back()

        return carry_out

    def await_inputs(self) -> None:
        """Wait until the host's tensors hold the device's values from the time of the call."""
        if self._read_mark is not None:
            self.stream.await_on_host(self._read_mark)
        self._arriving.clear()

    def abandon(self) -> None:
        """Abandon a refused call. Its host memory is reused once the queued copies to it are complete."""
        arriving, self._arriving, self._written = self._arriving, [], []
        if arriving:
            self._in_flight.hold(self._read_mark, arriving)

    def write_back(self) -> None:
        """Queue the copies to the device."""
        written, self._written = self._written, []
        with self.stream.queueing():
            for tensor, host in written:
                if tensor.numel() or host.numel():
                    _copy(tensor, host)
                    self.stream.keep(tensor)
        self._done_mark = self.stream.mark()
        self._in_flight.hold(self._done_mark, [host for _, host in written])

    def order_caller(self) -> None:
        """Make the caller's stream wait for the results; the host does not wait."""
        if self._done_mark is not None:
            self.stream.await_on_device(self._done_mark)


def _copy(tensor: Tensor, host: Tensor) -> None:
    # Inference tensors can only be written in inference mode, which is thread-local, and this may be another thread.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if tensor.layout is torch.strided:
            tensor.copy_(host, non_blocking=True)
        else:
            tensor.copy_(host.to(tensor.device))
