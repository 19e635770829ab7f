"""`MpiProcessGroup` is the process group that torch sees as its backend "mpi"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.arguments import one
from phalanx.backend.dynamo import untraced
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.backend.process_group.entry import entry_point
from phalanx.backend.work import Closable, PhalanxWork, SerialExecutor
from phalanx.deadline import Deadline
from phalanx.engines.mpi import Underway
from phalanx.transport.mpi.operations import MpiTransport
from phalanx.transport.tensors import dense, write_back

_SINGLE = "takes a single tensor"
_PAUSE_S = 0.0005


@untraced
class MpiProcessGroup(PhalanxProcessGroup):
    """It carries all collectives and messages of `torch.distributed` over MPI, on CPU tensors.

    `init_process_group("mpi")` makes it; programs do not. A message starts when it is called for, whatever came before.
    """

    def __init__(
        self,
        store: Any,
        transport: MpiTransport,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(store, transport, rank, size, timeout, name, ranks)
        self._mpi = transport
        self._futures = SerialExecutor(f"phalanx-{name}-futures")

    def getBackendName(self) -> str:
        """Return the name under which torch knows us."""
        return "mpi"

    _get_backend_name = getBackendName
    name = getBackendName

    @entry_point
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Send the tensor; the work is over when it may be changed again, which may be before the receiver has it."""
        tensor = one(tensors, "send", words=_SINGLE)
        self._check_peer(dst, "send", "dst")
        deadline = self._deadline()
        data = dense(tensor.detach())
        message = self._mpi.begin_send(data, dst, tag)

        def end() -> int:
            self._mpi.end_send(message, dst, deadline)
            return self._rank

        return self._under_way(tensor, message, end)

    def _receive(self, tensor: Tensor, src: int, tag: int) -> dist.Work:
        deadline = self._deadline()
        data = dense(tensor.detach())
        message = self._mpi.begin_recv(data, src, tag)

        def end() -> int:
            source = self._mpi.end_recv(message, data, src, deadline)
            if data.data_ptr() != tensor.data_ptr():
                write_back(tensor, data)
            return source

        return self._under_way(tensor, message, end)

    def _executors(self) -> list[Closable]:
        return [*super()._executors(), self._futures]

    def _deadline(self) -> Deadline:
        return Deadline.after(self._call_context(None, 5).timeout_s)

    def _under_way(self, tensor: Tensor, message: Underway, end: Callable[[], int]) -> dist.Work:
        work = MessageWork([tensor], message, end, self._futures)
        self._recent.append(work)
        return work


@untraced
class MessageWork(PhalanxWork):
    """This is the work of a message that is being sent or received. Waiting for it, or asking for its end, asks MPI."""

    def __init__(
        self, outputs: Sequence[Tensor], message: Underway, end: Callable[[], int], futures: SerialExecutor
    ) -> None:
        super().__init__(outputs)
        self._message = message
        self._end = end
        self._futures = futures
        self._ending = threading.Lock()

    def _bring_about(self, deadline: Deadline | None) -> None:
        if deadline is None:
            self._conclude()
            return
        while not deadline.passed and not self.is_completed():
            self._done.wait(min(_PAUSE_S, deadline.left_s))

    def is_completed(self) -> bool:
        """Return whether the message is over, well or not; this asks MPI."""
        if not self._done.is_set():
            try:
                over = self._message.test()
            except RuntimeError:
                over = True
            if over:
                self._conclude()
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of output tensors; a thread waits for it."""
        future = super().get_future()
        if not self._done.is_set():
            self._futures.put(self._conclude, PhalanxWork([]))
        return future

    def _conclude(self) -> None:
        with self._ending:
            if self._done.is_set():
                return
            error: BaseException | None = None
            try:
                self._source = self._end()
            except Exception as e:  # whatever it was, the waiter must hear it; Ctrl-C is the waiter's own
                error = e
            notify = self.settle(error)
            if notify is not None:
                notify()
            self.release()
