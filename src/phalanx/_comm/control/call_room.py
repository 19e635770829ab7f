"""`CallRoom` limits how many calls of a process wait for the coordinator at a time."""

from __future__ import annotations

import threading


class CallRoom:
    """There is room for `size` calls. Any number of threads may use it."""

    def __init__(self, size: int) -> None:
        self._num_free = size
        self._changed = threading.Condition(threading.Lock())

    def take(self, number: int, timeout_s: float) -> bool:
        """Take room for so many calls as soon as there is room for all of them; return False when time is up.

        Nothing is held while it waits, so that two that take much do not wait for each other.
        """
        with self._changed:
            if self._num_free < number and not self._changed.wait_for(
                lambda: self._num_free >= number, min(timeout_s, threading.TIMEOUT_MAX)
            ):
                return False
            self._num_free -= number
            return True

    def give_back(self, number: int = 1) -> None:
        with self._changed:
            self._num_free += number
            self._changed.notify_all()
