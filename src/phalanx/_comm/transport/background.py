"""Wait in an engine on threads of their own, so that the calling thread still hears signals and lost connections."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import Engine

# A message that is whole once it has begun to come: the sender's kernel took it in one write, and sends it also for a
# process that is killed.
WHOLE_BYTES = 2**14
LOOK_EVERY_S = 0.5
_GRACE_S = 0.05
_JOIN_S = 5.0

T = TypeVar("T")


def get_soon(outcomes: queue.SimpleQueue[T], timeout_s: float) -> T:
    """Return what `outcomes.get` returns; when time is up, wait a moment more, before the caller checks the peer.

    To look is to write, and that closes a connection whose other end has left, with all that Gloo's thread has not read
    from it yet. After this process has stood still (stopped, or without a core) both wake up at once.

    Raises:
        queue.Empty: nothing came.
    """
    try:
        return outcomes.get(timeout=timeout_s)
    except queue.Empty:
        return outcomes.get(timeout=_GRACE_S)


def look_at(engine: Engine, peer: int, error_of: Callable[[str], Exception]) -> Callable[[], None]:
    """Return a `look` for `Background.run`: it raises error_of(what the engine says) if `peer`'s connection is gone.

    The second time it sees that: the last message of a peer that has left is there by then.
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
    """They are the threads of this process that wait in engines: as many as operations are under way at once."""

    def __init__(self) -> None:
        self.num_users = 0
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def start(self, operation: Callable[[], object], outcome: queue.SimpleQueue[BaseException | None]) -> None:
        """Let a thread carry out `operation`, and put what it raises, or None, into `outcome`."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self)
        worker.tasks.put((operation, outcome))

    def enter(self) -> None:
        """Count a user: the threads are kept as long as there is one."""
        with self._lock:
            self.num_users += 1

    def leave(self) -> None:
        """Count a user no more; after the last one the idle threads end, and the others when they are idle."""
        with self._lock:
            self.num_users -= 1
        if not self.num_users:
            self.end_idle()

    def end_idle(self) -> None:
        """End the threads that carry out nothing."""
        ended = []
        with contextlib.suppress(IndexError):  # another thread may take the last
            while True:
                ended.append(self._idle.pop())
        for worker in ended:
            worker.tasks.put(None)
        for worker in ended:
            if worker.thread is not threading.current_thread():
                worker.thread.join(_JOIN_S)

    def take_back(self, worker: _Worker) -> bool:
        """Take `worker` back; False if nobody needs it any more."""
        if not self.num_users:
            return False
        self._idle.append(worker)
        return True


class _Worker:
    """A worker is a thread that carries out one operation at a time."""

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
            except BaseException as raised:  # whatever it was, the waiter must hear it
                error = raised
            del operation, task  # their objects may go while this thread waits for the next
            goes_on = self._workers.take_back(self)  # before it is told: who goes on at once finds this thread
            outcome.put(error)
            del error, outcome


_workers = _Workers()


def _begin_anew() -> None:
    """Begin with no threads in the child of a fork, which has none of its parent's."""
    global _workers
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Background:
    """It runs the operations of one group for which other threads of this process wait."""

    def __init__(self) -> None:
        self._underway: dict[int, queue.SimpleQueue[BaseException | None]] = {}  # keyed by identity of the queue
        self._workers = _workers
        self._workers.enter()
        self._is_closed = False

    def start(self, operation: Callable[[], object]) -> queue.SimpleQueue[BaseException | None]:
        """Let another thread carry out `operation`; what it raises, or None, is put into the queue.

        Whoever has got that, or waits for it no more, calls `over` with the queue.
        """
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._underway[id(outcome)] = outcome
        self._workers.start(operation, outcome)
        return outcome

    def over(self, outcome: queue.SimpleQueue[BaseException | None]) -> None:
        """Do not wait for this operation in `close`: it is over, or stuck until the engine lets it go."""
        del self._underway[id(outcome)]

    def run(
        self,
        operation: Callable[[], object],
        look: Callable[[], None],
        interrupted: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Carry out `operation`, and raise what it raises. `look` is called while it takes long, and may raise.

        What a signal handler raises meanwhile is given to `interrupted`. After either, the operation goes on until the
        engine ends it.
        """
        outcome = self.start(operation)
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    error = get_soon(outcome, LOOK_EVERY_S)
                    break
                look()
        except Exception:
            self.over(outcome)
            raise
        except BaseException as raised:  # it may be Ctrl-C
            interrupted(raised)
            raise
        self.over(outcome)
        if error is not None:
            raise error

    def close(self) -> None:
        """Return when the interrupted operations are over, too: the engine is closed, or nothing ends them."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline.after(_JOIN_S)
        for outcome in tuple(self._underway.values()):
            with contextlib.suppress(queue.Empty):
                outcome.get(timeout=max(deadline.left_s, 0.0))
        self._workers.leave()
