"""A thread that waits in an engine for those who must go on hearing: signals, and that a connection is gone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_LOOK_EVERY_S = 0.5
_JOIN_S = 5.0


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
                return self._outcomes.get(timeout=_LOOK_EVERY_S)
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
