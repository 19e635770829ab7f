"""A copy stream copies a device's tensors from and to the host, beside the stream that computes.

    the caller's stream   ── kernels ──┐                                    ┌── kernels that read the result
    the copy stream                    └─▶ device to host ─▶ ·····  host to device ─┘
    the host                                                 the collective

`torch.get_device_module` gives the streams and events of any accelerator that has some, under CUDA's names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.deadline import Deadline

_PAUSE_S = 0.001


class CopyStream(Protocol):
    """The copies of one device are queued on it."""

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        """What a future must be told whose value lies on the device."""

    def follow_caller(self) -> None:
        """Let what is queued from now on come after all that the calling thread has queued on its own stream."""

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Queue here what the block does with the device's tensors."""

    def mark(self) -> Any:
        """Return a point after all that has been queued here."""

    def drain(self, patience_s: float) -> bool:
        """Whether all that was queued here is over, after at most so long."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` from others until what is queued here is over."""

    def await_on_host(self, mark: Any) -> None:
        """Return when what came before `mark` is over."""

    def is_over(self, mark: Any) -> bool:
        """Whether what came before `mark` is over."""

    def await_on_device(self, mark: Any) -> None:
        """Let what the calling thread queues on its own stream from now on come after `mark`; the host goes on."""


class InOrder:
    """It is a device whose operations are over when they return."""

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        """None that has streams."""
        return []

    def follow_caller(self) -> None:
        """Nothing is under way."""

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Done at once."""
        yield

    def mark(self) -> Any:
        """Now."""
        return True

    def drain(self, patience_s: float) -> bool:
        """Return True: nothing is queued."""
        return True

    def keep(self, tensor: Tensor) -> None:
        """Nothing uses it any longer."""

    def await_on_host(self, mark: Any) -> None:
        """Do nothing: it is over."""

    def is_over(self, mark: Any) -> bool:
        """Return True: it is over."""
        return True

    def await_on_device(self, mark: Any) -> None:
        """Do nothing: it is over."""


class DeviceStream:
    """It is a stream of its own on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)

    @property
    def future_devices(self) -> list[int | str | torch.device]:
        """This one."""
        return [self._device]

    def follow_caller(self) -> None:
        """Let the copy stream wait for the caller's; the host does not."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Make it this thread's stream for a while."""
        block: contextlib.AbstractContextManager[None] = self._module.stream(self._stream)
        return block

    def mark(self) -> Any:
        """Return an event behind what is queued."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def drain(self, patience_s: float) -> bool:
        """Ask again and again: a kernel that never ends must not keep the process from ending."""
        mark, deadline = self.mark(), Deadline.after(patience_s)
        while not self.is_over(mark):
            if deadline.passed:
                return False
            time.sleep(_PAUSE_S)
        return True

    def keep(self, tensor: Tensor) -> None:
        """Tell the device's allocator."""
        if tensor.layout is torch.strided:
            tensor.record_stream(self._stream)

    def await_on_host(self, mark: Any) -> None:
        """Block this thread; others go on."""
        mark.synchronize()

    def is_over(self, mark: Any) -> bool:
        """Ask the device, and go on."""
        over: bool = mark.query()
        return over

    def await_on_device(self, mark: Any) -> None:
        """Let the caller's stream wait for the event; the host does not."""
        self._module.current_stream(self._device).wait_event(mark)


def open_copy_stream(device: torch.device) -> CopyStream:
    """Return the copy stream for `device`, a new one; in order where the device has no streams."""
    module: Any = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
    if module is None or not (hasattr(module, "Stream") and hasattr(module, "Event")):
        return InOrder()
    return DeviceStream(device)
