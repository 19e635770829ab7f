"""`Inbox` owns the posted receives, and a thread that receives messages while no other thread waits for a message."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._base.threads import start_thread
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.work import CompletedWork, PhalanxWork
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.shared_memory import PostedReceive, SharedMemoryTransport
from phalanx._core import Receive
from phalanx.errors import ClosedError


@untraced
class ReceiveWork(PhalanxWork):
    """A `ReceiveWork` is a posted receive. A thread that waits for it receives the messages of all posted receives."""

    def __init__(self, inbox: Inbox, receive: PostedReceive, tensor: Tensor) -> None:
        super().__init__([tensor])
        self._inbox = inbox
        self.receive: PostedReceive | None = receive  # None once it has completed

    @property
    def is_pending(self) -> bool:
        """Return whether the message has not arrived, and the receive has not failed."""
        receive = self.receive
        return receive is not None and receive.is_pending

    def get_future(self) -> torch.futures.Future[Any]:
        self._begin_timeout()
        return super().get_future()

    def _begin_timeout(self) -> None:
        if (receive := self.receive) is not None:
            receive.begin_timeout()

    def progress(self, deadline: Deadline | None) -> None:
        """Receive messages until the work has completed or the deadline has passed.

        Without a deadline the group's timeout begins now, and not when the receive was posted, which may be long before
        the peer sends.
        """
        if deadline is None:
            self._begin_timeout()
        self._inbox.wait_for(self, deadline or Deadline.after(None))

    def is_completed(self) -> bool:
        """Return whether the receive has completed, successfully or not; this polls once for messages."""
        if not super().is_completed():
            self._inbox.poll()
        return super().is_completed()

    def finish(self) -> None:
        """Complete the work with the receive's outcome, and wake all waiters. This is called once."""
        error: BaseException | None = None
        receive = self.receive
        assert receive is not None
        try:
            receive.conclude()
        except BaseException as e:  # the waiter must receive any error
            error = e
        self.source, self.receive = receive.source, None
        notify = self.complete(error)
        if notify is not None:
            notify()
        self.wake_waiters()


class Inbox:
    """An `Inbox` matches messages with receives by sender and tag, in the order in which the receives were posted.

    One thread serves all senders and tags. The thread starts with the first receive whose message has not arrived,
    and stays idle while another thread waits.
    """

    def __init__(self, memory: SharedMemoryTransport, group: str) -> None:
        self._memory = memory
        self._group = group
        self._works: dict[Receive, ReceiveWork] = {}  # by handle
        self._ended: list[Receive] = []  # receives that the core has completed and no thread has finished yet
        self._stopped = False
        self._starting = threading.RLock()  # reentrant: a signal handler may post a receive meanwhile
        self._begun = False
        self._thread: threading.Thread | None = None

    def post(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> PhalanxWork | CompletedWork:
        """Post a receive into `tensor` of the next message with `tag` from `src` (negative: any rank); do not wait."""
        receive = self._memory.post(tensor, src, tag, ctx, handed_over=True)
        if self._works:
            self._reap()  # the messages that arrived may have completed other receives
        if receive.has_arrived:
            receive.conclude()
            return CompletedWork([tensor], source=receive.source)
        work = ReceiveWork(self, receive, tensor)
        self._works[receive.handle] = work
        if not work.is_pending:  # it failed at once, or another thread received its message meanwhile
            self._finish(receive.handle)
        elif self._thread is None:
            self._start()
        return work

    def wait_for(self, work: ReceiveWork, deadline: Deadline) -> None:
        """Receive messages until `work` has completed or the deadline has passed."""
        while (receive := work.receive) is not None and receive.is_pending and not deadline.passed:
            try:
                self._memory.core.progress(receive.handle, timeout_ns(deadline.left_s))
            except BaseException as error:
                with contextlib.suppress(ClosedError):
                    self._memory.core.set_exit_reason(type(error).__name__)
                self._reap()
                raise
            self._reap()
        self._reap()

    def poll(self) -> None:
        """Receive the messages that have arrived."""
        if self._works:
            with contextlib.suppress(ClosedError):
                self._memory.core.poll()
            self._reap()

    def close(self, timeout_s: float) -> bool:
        """Wait for the posted receives, then stop the thread; return whether all completed within `timeout_s`."""
        deadline = Deadline.after(timeout_s)
        for work in list(self._works.values()):
            self.wait_for(work, deadline)
        if self._works:
            return False
        with self._starting:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._stopped = True
        with contextlib.suppress(ClosedError):
            self._memory.core.stop_progress_thread()
        thread.join(max(1.0, deadline.left_s))
        return not thread.is_alive()

    def _start(self) -> None:
        with self._starting:
            if not self._begun:
                self._begun = True
                self._thread = start_thread(self._make_progress, f"phalanx-{self._group}-recv")

    def _make_progress(self) -> None:
        with contextlib.suppress(ClosedError):
            while not self._stopped:
                self._memory.core.progress_thread()
                self._reap()

    def _reap(self) -> None:
        """Finish the works whose receives have completed. Cost: independent of the number of other posted receives."""
        try:
            self._memory.core.take_ended(self._ended)
        except ClosedError:  # the group is closed, and its receives have failed
            self._ended += [handle for handle, work in list(self._works.items()) if not work.is_pending]
        while self._ended:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._finish(self._ended.pop(0))

    def _finish(self, handle: Receive) -> None:
        """Finish a work whose receive has completed. Any thread may call this; only one thread finishes the work."""
        work = self._works.pop(handle, None)
        if work is not None:
            work.finish()
