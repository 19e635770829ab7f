"""Run an engine's blocking calls on background threads, so that the caller still handles signals and lost peers."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from phalanx._base.deadline import Deadline
from phalanx._comm.diagnostics.interruptions import is_interruption
from phalanx._comm.engines.engine import Engine

# A message of at most this size arrives whole once its first byte has arrived: the sender's kernel accepted it in one
# write, and sends it even if the process is killed.
WHOLE_BYTES = 2**14
LOOK_EVERY_S = 0.5
GRACE_S = 0.05
_JOIN_S = 5.0

T = TypeVar("T")


def get_soon(outcomes: queue.SimpleQueue[T], timeout_s: float) -> T:
    """Return the next outcome; after `timeout_s`, wait a moment longer, because the caller then checks the peer.

    A check writes to the connection. If the peer has left, the write closes the connection, and data that Gloo's thread
    has not read yet are lost. If this process was stopped, or got no CPU time, both threads wake up together, and the
    extra wait lets Gloo's thread read the data first.

    Raises:
        queue.Empty: there was no outcome.
    """
    try:
        return outcomes.get(timeout=timeout_s)
    except queue.Empty:
        return outcomes.get(timeout=GRACE_S)


def look_at(engine: Engine, peer: int, error_of: Callable[[str], Exception]) -> Callable[[], None]:
    """Return a `look` for `Background.run` that raises error_of(the engine's error) if `peer`'s connection is lost.

    `look` raises when it observes the loss for the second time: by then the last message of a leaving peer has arrived.
    """
    is_gone = False

    def look() -> None:
        nonlocal is_gone
        try:
            engine.check(peer)
        except RuntimeError as error:
            if is_gone:
                raise error_of(str(error)) from error
            is_gone = True

    return look


class _Workers:
    """`_Workers` are the threads of this process that wait in engines, one for each concurrent operation."""

    def __init__(self) -> None:
        self.num_users = 0
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def start(self, operation: Callable[[], object], outcome: queue.SimpleQueue[BaseException | None]) -> None:
        """Run `operation` on a thread, and put its exception, or None, into `outcome`."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self)
        worker.tasks.put((operation, outcome))

    def enter(self) -> None:
        """Add a user: the threads are kept while there is one."""
        with self._lock:
            self.num_users += 1

    def leave(self) -> None:
        """Remove a user; after the last one the threads end as soon as they are idle."""
        with self._lock:
            self.num_users -= 1
        if not self.num_users:
            self.end_idle()

    def end_idle(self) -> None:
        """End the idle threads, and wait for them."""
        ended = []
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                ended.append(self._idle.pop())
        for worker in ended:
            worker.tasks.put(None)
        for worker in ended:
            if worker.thread is not threading.current_thread():
                worker.thread.join(_JOIN_S)

    def take_back(self, worker: _Worker) -> bool:
        """Return `worker` to the idle threads; False if it is no longer needed."""
        if not self.num_users:
            return False
        self._idle.append(worker)
        return True


class _Worker:
    """A `_Worker` is a thread that runs one operation at a time."""

    def __init__(self, workers: _Workers) -> None:
        self.tasks: queue.SimpleQueue[tuple[Callable[[], object], queue.SimpleQueue[BaseException | None]] | None] = (
            queue.SimpleQueue()
        )
        self._workers = workers
        self.thread = threading.Thread(target=self._serve, name="phalanx-background", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        goes_on = True
        while goes_on and (task := self.tasks.get()) is not None:
            operation, outcome = task
            error: BaseException | None = None
            try:
                operation()
            except BaseException as raised:  # the waiting thread must receive any exception
                error = raised
            del operation, task  # release their objects before this thread waits for the next task
            goes_on = self._workers.take_back(self)  # first: the waiting thread may need this worker at once
            outcome.put(error)
            del error, outcome


_workers = _Workers()


def _begin_anew() -> None:
    """Start without threads in a forked child, which has none of its parent's threads."""
    global _workers
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Background:
    """A `Background` runs operations of one group on other threads, while the calling threads wait for them."""

    def __init__(self) -> None:
        self._underway: dict[int, queue.SimpleQueue[BaseException | None]] = {}  # keyed by the queue's identity
        self._workers = _workers
        self._workers.enter()
        self._is_closed = False

    def start(self, operation: Callable[[], object]) -> queue.SimpleQueue[BaseException | None]:
        """Run `operation` on another thread; its exception, or None, is put into the returned queue.

        The caller must call `over` with the queue after receiving the result, or when it stops waiting.
        """
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._underway[id(outcome)] = outcome
        self._workers.start(operation, outcome)
        return outcome

    def over(self, outcome: queue.SimpleQueue[BaseException | None]) -> None:
        """Exclude this operation from the wait in `close`: it has ended, or is blocked until the engine is closed."""
        del self._underway[id(outcome)]

    def run(
        self,
        operation: Callable[[], object],
        look: Callable[[], None],
        interrupted: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Run `operation` on another thread, and raise its exception.

        While the operation runs, call `look` every half second; it may raise. If a KeyboardInterrupt or an exception
        from a signal handler interrupts this thread, call `interrupted` with it before raising it. After an exception
        in this thread, the operation continues until it completes or the engine is closed.
        """
        outcome = self.start(operation)
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    error = get_soon(outcome, LOOK_EVERY_S)
                    break
                look()
        except BaseException as raised:
            if is_interruption(raised):
                interrupted(raised)
            else:
                self.over(outcome)
            raise
        self.over(outcome)
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait up to five seconds for interrupted operations to end. Close the engine first, which ends them."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline.after(_JOIN_S)
        for outcome in tuple(self._underway.values()):
            with contextlib.suppress(queue.Empty):
                outcome.get(timeout=max(deadline.left_s, 0.0))
        self._workers.leave()
