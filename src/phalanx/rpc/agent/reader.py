"""The reader is the thread that reads a worker's connections. It runs no user code and never waits for another thread.

    reader      | poll | read | call: to a thread | answer: set its future | callback: to a thread | poll
    thread             ............................ | run the function, answer ..

Between two reads, the reader runs the tasks that other threads have queued, in order. It is also the timer: it calls
`tick` when it is due, and `relieve` every millisecond while work or answers are queued.

A finalizer of the user may run in any thread and wait for a call. In the reader, such a wait continues reading.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from phalanx._base.ipc.spin_wait import SpinWait
from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.log import get_logger
from phalanx.errors import message_of
from phalanx.rpc.agent.pool import STUCK_S
from phalanx.rpc.wire import Frame

_logger = get_logger(__name__)

_MOST_S = 3600.0
_JOIN_S = 5.0  # a finalizer may be stuck in the reader
Task = Callable[[], None]


class Readable(Protocol):
    """A `Readable` owns a descriptor that the reader polls."""

    def ready(self, events: int) -> None:
        """Handle the `events` of epoll for the descriptor."""


class _ThisThread(threading.local):
    """`_ThisThread` is set only in the reader: the callbacks for other threads, and the function that reads more."""

    callbacks: deque[Task] | None = None
    read_more: Callable[[], None] | None = None


this_thread = _ThisThread()


class ConnectionReader:
    """A `ConnectionReader` is the reader of one agent.

    None of the functions below may raise or wait.

    Arguments:
        handle: called with each frame and its connection.
        run: runs the callbacks of answers in another thread.
        relieve: returns whether to call it again in a millisecond.
        tick: called with the monotonic time; returns the time of the next call.
    """

    def __init__(
        self,
        handle: Callable[[Any, Frame], None],
        run: Callable[[Task], None],
        relieve: Callable[[], bool],
        tick: Callable[[float], float],
    ) -> None:
        self._handle = handle
        self._run = run
        self._relieve = relieve
        self._tick = tick
        self._poll = select.epoll()
        self._readable: dict[int, Readable] = {}
        self._incoming: deque[tuple[Any, Frame] | Task] = deque()
        self._wakeup = Wakeup()
        self._due = math.inf  # when the reader ticks next
        self._wanted: deque[float] = deque()  # earlier ticks that other threads have requested
        self._relieve_at = math.inf
        self._spin = SpinWait()
        self._closed = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._read_all, name="phalanx-rpc-reader", daemon=True)
        self.watch(self._wakeup.fileno(), self)

    def start(self) -> None:
        self._thread.start()

    # -- descriptors ---------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Readable, events: int = select.EPOLLIN) -> None:
        """Call `readable.ready(events)` when `fd` is ready."""
        self._readable[fd] = readable
        self._poll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Poll `fd` for these events from now on."""
        with contextlib.suppress(OSError, ValueError):  # the reader has ended
            self._poll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop polling `fd`."""
        if self._readable.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(fd)

    def put(self, item: tuple[Any, Frame] | Task) -> None:
        """Queue a frame with its connection, or a task. Locks nothing, because finalizers may call it."""
        self._incoming.append(item)
        self._wakeup.ring()
        if self._has_ended:
            self._handle_all()

    def queue(self, item: tuple[Any, Frame] | Task) -> None:
        """Queue an item in the reader's own thread, which needs no wakeup."""
        self._incoming.append(item)

    @property
    def due(self) -> float:
        """Return the time of the next tick."""
        return self._due

    def wake_by(self, due: float) -> None:
        """Make the reader tick by `due`. Locks nothing, because finalizers may call it."""
        if due < self._due:
            self._wanted.append(due)
            self._wakeup.ring()

    def ready(self, events: int) -> None:
        self._wakeup.drain()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        this_thread.callbacks, this_thread.read_more = deque(), self._read_more
        while not self._closed:
            self._read_more()

    def _read_more(self) -> None:
        """Handle the queued items; if there are none, wait for the next ones."""
        if self._incoming:
            self._handle_all()
            return
        now = time.monotonic()
        while self._wanted:
            self._due = min(self._due, self._wanted.popleft())
        if now >= self._due:
            self._due = math.inf  # reset before the tick, because another thread may request an earlier tick meanwhile
            self._incoming.append(self._tick_now)
            return
        if now >= self._relieve_at:
            self._relieve_at = math.inf
        if self._relieve_at == math.inf and self._relieve():
            self._relieve_at = now + STUCK_S
        until = min(self._due, self._relieve_at)
        self._spin.wait(self._poll.fileno(), -1, math.ceil(min(until - now, _MOST_S) * 1000))
        for fd, events in self._poll.poll(0):
            readable = self._readable.get(fd)
            if readable is not None:
                readable.ready(events)
        self._handle_all()

    def _tick_now(self) -> None:
        self._due = min(self._due, self._tick(time.monotonic()))

    def _handle_all(self) -> None:
        before = this_thread.callbacks
        callbacks = this_thread.callbacks = deque() if before is None else before
        try:
            while self._incoming:
                try:
                    item = self._incoming.popleft()
                except IndexError:  # after the reader has ended, several threads may be here
                    return
                if isinstance(item, tuple):
                    self._handle(*item)
                else:
                    item()
                del item  # releases the frame's tensors
                if callbacks:
                    self._run(_in_order(callbacks))
        finally:
            this_thread.callbacks = before

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread, and handle the queued items; a thread that queues an item later handles it itself."""
        self._closed = True
        self._wakeup.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._has_ended = True
        self._handle_all()

    def release(self) -> None:
        """Close the descriptors."""
        self._poll.close()
        self._wakeup.close()


def _in_order(callbacks: deque[Task]) -> Task:
    """Move these callbacks into a task that runs them one after another."""
    queued = list(callbacks)
    callbacks.clear()

    def run() -> None:
        for one in queued:
            try:
                one()
            except BaseException as error:  # torch, too, reports the error and continues
                _logger.error("rpc: a callback of a future raised %s: %s", type(error).__name__, message_of(error))

    return run
