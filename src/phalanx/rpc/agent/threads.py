"""Run work that may wait long on threads that do not count among those that serve calls, and are used again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx._base.deadline import join_all


class Threads:
    """`Threads` has as many threads as there is work at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Slot] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, work: Callable[[], None]) -> None:
        """Run the work in a thread; it must not raise. This never waits."""
        with self._lock:
            if self._closed:
                return
            slot = self._idle.pop() if self._idle else None
            if slot is None:
                thread = threading.Thread(target=self._serve, args=(_Slot(work),), name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
                return
        slot.work = work
        slot.gate.release()

    def _serve(self, slot: _Slot) -> None:
        while slot.work is not None:
            slot.work()
            slot.work = None
            with self._lock:
                if self._closed:
                    return
                self._idle.append(slot)
            slot.gate.acquire()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads that are idle; work that is under way is waited for up to `timeout_s`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for slot in idle:
            slot.gate.release()
        join_all(self._threads, timeout_s)


class _Slot:
    """`_Slot` is where a thread waits for work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.gate = threading.Lock()
        self.gate.acquire()
