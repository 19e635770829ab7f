"""A thread that waits in an engine for those who must go on hearing: signals, and that a connection is gone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from phalanx.engines.engine import Engine

# A message that is whole once it has begun to come: the sender's kernel took it in one write, and sends it also for a
# process that is killed.
WHOLE_BYTES = 2**14
LOOK_EVERY_S = 0.5
_GRACE_S = 0.05
_JOIN_S = 5.0

T = TypeVar("T")


def get_soon(outcomes: queue.SimpleQueue[T], timeout_s: float) -> T:
    """As `outcomes.get`, with a moment more once time is up: before one looks whether a connection is gone.

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
    """For `BackgroundThread.run`: raises error_of(what the engine says) if the connection with `peer` is gone.

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


class BackgroundThread:
    """One thread for one operation at a time; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running = threading.Lock()
        self._is_stuck = False
        self.caller = 0  # the thread that waits for what it carries out

    def run(
        self,
        operation: Callable[[], None],
        interrupted: Callable[[BaseException], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry out `operation` and raise what it raises. `look` is called while that takes long, and may raise.

        What a signal handler raises meanwhile is given to `interrupted`. After either, the operation goes on until the
        engine ends it, and nothing else may be run.
        """
        with self._running:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self.caller = threading.get_ident()
            self._operations.put(operation)
            try:
                error = self._wait(look)
            except Exception:
                self._is_stuck = True
                raise
            except BaseException as raised:  # Ctrl-C
                interrupted(raised)
                raise
            finally:
                self.caller = 0
        if error is not None:
            raise error

    def _wait(self, look: Callable[[], None]) -> BaseException | None:
        while True:
            try:
                return get_soon(self._outcomes, LOOK_EVERY_S)
            except queue.Empty:
                look()

    def _serve(self) -> None:
        while (operation := self._operations.get()) is not None:
            error: BaseException | None = None
            try:
                operation()
            except BaseException as raised:  # whatever it was, the waiter must hear it
                error = raised
            del operation
            self._outcomes.put(error)
            del error

    def close(self) -> None:
        """End the thread, once what it carries out is over."""
        self._operations.put(None)
        if self._thread is not None and self._thread is not threading.current_thread() and not self._is_stuck:
            self._thread.join(_JOIN_S)


class BackgroundThreads:
    """As many of them as there are operations at a time. They are kept until the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[BackgroundThread] = []
        self._is_closed = False

    def run(self, operation: Callable[[], None], look: Callable[[], None]) -> None:
        """Carry out `operation` and raise what it raises. `look` is called while that takes long, and may raise."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = BackgroundThread(self._name)
        try:
            thread.run(operation, lambda error: None, look)
        except BaseException:
            thread.close()  # it may be stuck: it ends when the engine lets it go
            raise
        self._idle.append(thread)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """End those that carry out nothing; the others follow."""
        self._is_closed = True
        with contextlib.suppress(IndexError):  # another thread may take the last
            while True:
                self._idle.pop().close()
