"""This is the work of operations on device tensors without an engine: waiting for it orders the device's streams."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.work import DoneWork, PhalanxWork
from phalanx._comm.transport.staging import StagedCall


@untraced
class StagedWork(PhalanxWork):
    """This is the work of a collective in the background.

    `wait` returns when the ranks have exchanged, and raises the operation's own error; the copies back to the device
    may still be queued: the caller's stream waits for them, as with NCCL. Futures carry the device's tensors.
    """

    def __init__(self, call: StagedCall) -> None:
        super().__init__(call.outputs)
        self._call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the host's part is over; operations that the caller queues afterwards see the results."""
        over = super().wait(timeout)
        self._call.order_caller()
        return over

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=self._call.stream.future_devices)

    def _fulfil(self, future: torch.futures.Future[Any], outputs: list[Any]) -> None:
        with self._call.stream.queueing():  # so that callbacks, and who waits for the future, come after the copies
            super()._fulfil(future, outputs)


@untraced
class StagedDone(DoneWork):
    """This is the work of a collective that was carried out before its call returned."""

    def __init__(self, call: StagedCall, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True; a stream other than the one that called may wait, too."""
        self._call.order_caller()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._call.stream.future_devices)
        with self._call.stream.queueing():
            future.set_result(list(self._outputs))
        return future


@untraced
class StagedReceive(dist.Work):
    """It receives into the host's memory; the message is copied to the device when somebody asks whether it came."""

    def __init__(self, work: Any, call: StagedCall) -> None:
        super().__init__()
        self._work = work
        self._call = call
        self._outputs = call.outputs
        self._copying = threading.Lock()
        self._copied = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is there; the caller's stream waits for its copy to the device."""
        self._work.wait(timeout) if timeout is not None else self._work.wait()
        self._copy()
        self._call.order_caller()
        return True

    def synchronize(self) -> None:
        """Block as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        over: bool = self._work.is_completed()
        if over and self._work.is_success():
            self._copy()
        return over

    def is_success(self) -> bool:
        """Return whether it is over and went well."""
        return self.is_completed() and bool(self._work.is_success())

    def exception(self) -> Any:
        """Return what went wrong, if anything did."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the tensor, once it is there."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        rank: int = self._work.source_rank()
        return rank

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the tensor on its device."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._call.stream.future_devices)

        def told(came: torch.futures.Future[Any]) -> None:
            try:
                came.value()
                self._copy()
            except Exception as error:
                future.set_exception(error)
                return
            with self._call.stream.queueing():
                future.set_result(self._outputs)

        self._work.get_future().add_done_callback(told)
        return future

    def _copy(self) -> None:
        with self._copying:
            if not self._copied:
                self._call.write_back()
                self._copied = True
