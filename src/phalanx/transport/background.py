"""A thread that carries out what the main thread must not wait for itself: it could not hear Ctrl-C."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_JOIN_S = 5.0


class BackgroundThread:
    """One thread for one operation at a time; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_busy = False  # somebody waits for what it carries out

    def run(self, operation: Callable[[], None], interrupted: Callable[[BaseException], None]) -> None:
        """Carry out `operation` and raise what it raises. What ends the wait before is given to `interrupted`.

        After that the operation goes on until somebody ends it, and nothing else may be run.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self.is_busy = True
        self._operations.put(operation)
        try:
            error = self._outcomes.get()
        except BaseException as raised:  # Ctrl-C, or a signal handler that raised
            interrupted(raised)
            raise
        finally:
            self.is_busy = False
        if error is not None:
            raise error

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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
