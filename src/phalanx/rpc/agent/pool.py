"""Run user code in threads: one at first, and twice as many whenever no queued work has begun for a millisecond.

    put                f | g | h | ..
    first thread       f | g: blocks .............. | park
    reader             |     1 ms: no work has begun: wake one more
    second thread      parked                       | h | ..

So a queue of short tasks costs one thread switch, and a task that blocks delays the others by about a millisecond.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx._base.deadline import Deadline
from phalanx._base.threads import join_all

STUCK_S = 1e-3


class ThreadPool:
    """A `ThreadPool` has at most `most` threads. A thread without work calls `idle`, which must not wait."""

    def __init__(self, name: str, most: float = math.inf, idle: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._most = most
        self._idle = idle
        self._lock = threading.RLock()  # reentrant: its owner may run a finalizer, which may acquire it again
        self._work: deque[Callable[[], None]] = deque()
        self._parked: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._num_begun = 0
        self._seen = 0
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Return how many pieces of work have not begun."""
        return len(self._work)

    def put(self, work: Callable[[], None]) -> None:
        """Queue work for a thread. The work must not raise. Never waits."""
        self._work.append(work)
        if len(self._threads) == len(self._parked):
            with self._lock:
                if len(self._threads) == len(self._parked):
                    self._wake()

    def _wake(self) -> None:
        """Wake a thread, or start one; the caller owns the lock."""
        if self._parked:
            self._parked.pop().release()
        elif len(self._threads) < self._most and not self._closed:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def relieve(self) -> bool:
        """Wake more threads if no work has begun since the last call; return whether work is queued.

        Call this every millisecond.
        """
        if not self._work:
            return False
        with self._lock:
            if self._num_begun == self._seen:
                num_awake = len(self._threads) - len(self._parked)
                for _ in range(min(len(self._work), max(1, num_awake))):
                    self._wake()
            self._seen = self._num_begun
        return True

    def _serve(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        while True:
            while self._work:
                try:
                    work = self._work.popleft()
                except IndexError:  # another thread was faster
                    break
                self._num_begun += 1
                work()
                del work
            self._idle()
            with self._lock:
                if self._work:
                    continue
                if self._closed:
                    return
                self._parked.append(gate)
            gate.acquire()

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all work is done. This calls `relieve`, because the reader has ended."""
        deadline = Deadline.after(timeout_s)
        while len(self._threads) > len(self._parked) + self._is_ours() and not deadline.passed:
            self.relieve()
            time.sleep(STUCK_S)

    def _is_ours(self) -> bool:
        return threading.current_thread() in self._threads

    def close(self, timeout_s: float = 0.2) -> None:
        """End the threads: drop work that has not begun, and wait up to `timeout_s` for running work."""
        with self._lock:
            self._closed = True
            self._work.clear()
            parked, self._parked = self._parked, []
        for gate in parked:
            gate.release()
        join_all(self._threads, timeout_s)


class CallLimit:
    """A `CallLimit` limits the functions that run at once to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition(threading.Lock())
        self.num_running = 0
        self._closed = False

    def enter(self) -> bool:
        """Wait until another function may run, and count it; return False if the limit is closed."""
        with self._changed:
            while self.num_running >= self._most and not self._closed:
                self._changed.wait()
            self.num_running += 1
            return not self._closed

    def leave(self) -> None:
        with self._changed:
            self.num_running -= 1
            self._changed.notify()

    def close(self) -> None:
        """Wake all waiting threads; `enter` returns False from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
