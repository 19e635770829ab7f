"""A copy stream copies tensors between a device and the host, in parallel with the compute stream.

    the caller's stream   ── kernels ──┐                                    ┌── kernels that read the result
    the copy stream                    └─▶ device to host ─▶ ·····  host to device ─┘
    the host                                                 the collective

`torch.get_device_module` returns a module with the streams and events of any accelerator, named as in `torch.cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline

_PAUSE_S = 0.001


class CopyStream(Protocol):
    """A `CopyStream` is the queue of one device's copies."""

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        """Return the `devices` argument for a `torch.futures.Future` whose value is on the device."""

    def follow_caller(self) -> None:
        """Order later work here after all work that the calling thread has queued on its own stream."""

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which operations on the device's tensors are queued here."""

    def mark(self) -> Any:
        """Record a mark behind all work queued on this stream so far, and return it without waiting."""

    def drain(self, patience_s: float) -> bool:
        """Wait at most `patience_s`, and return whether all work queued here is complete."""

    def keep(self, tensor: Tensor) -> None:
        """Prevent reuse of the memory of `tensor` until the work queued here is complete."""

    def await_on_host(self, mark: Any) -> None:
        """Wait until the work before `mark` is complete."""

    def is_over(self, mark: Any) -> bool:
        """Return whether the work before `mark` is complete."""

    def await_on_device(self, mark: Any) -> None:
        """Order later work on the calling thread's own stream after `mark`; the host does not wait."""


class SynchronousCopies:
    """`SynchronousCopies` is for a device whose operations are complete when they return."""

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        """Return an empty list, since this device has no streams."""
        return []

    def follow_caller(self) -> None:
        """Do nothing: all earlier operations are complete."""

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Run the block as it is: each operation completes at once."""
        yield

    def mark(self) -> Any:
        """Return a mark; all operations before it are complete."""
        return True

    def drain(self, patience_s: float) -> bool:
        """Return True: nothing is queued."""
        return True

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: no operation uses the tensor any longer."""

    def await_on_host(self, mark: Any) -> None:
        """Do nothing: the operations are complete."""

    def is_over(self, mark: Any) -> bool:
        """Return True: the operations are complete."""
        return True

    def await_on_device(self, mark: Any) -> None:
        """Do nothing: the operations are complete."""


class DeviceStream:
    """A `DeviceStream` is a separate stream on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        return [self._device]

    def follow_caller(self) -> None:
        """Make the copy stream wait for the caller's stream; the host does not wait."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the copy stream is this thread's current stream."""
        block: contextlib.AbstractContextManager[None] = self._module.stream(self._stream)
        return block

    def mark(self) -> Any:
        """Record an event behind the queued work, and return it."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def drain(self, patience_s: float) -> bool:
        """Poll until all work is complete or the time is up; an endless kernel must not block the process's exit."""
        mark = self.mark()
        return Deadline.after(patience_s).wait_until(lambda: self.is_over(mark), _PAUSE_S)

    def keep(self, tensor: Tensor) -> None:
        """Notify the device's allocator that the copy stream uses the tensor."""
        if tensor.layout is torch.strided:
            tensor.record_stream(self._stream)

    def await_on_host(self, mark: Any) -> None:
        """Block this thread until the device has reached the event; other threads continue."""
        mark.synchronize()

    def is_over(self, mark: Any) -> bool:
        """Return whether the device has reached the event, without waiting."""
        over: bool = mark.query()
        return over

    def await_on_device(self, mark: Any) -> None:
        """Make the caller's stream wait for the event; the host does not wait."""
        self._module.current_stream(self._device).wait_event(mark)


def open_copy_stream(device: torch.device) -> CopyStream:
    """Return a new copy stream for `device`, or an `SynchronousCopies` if the device has no streams."""
    module: Any = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
    if module is None or not (hasattr(module, "Stream") and hasattr(module, "Event")):
        return SynchronousCopies()
    return DeviceStream(device)
