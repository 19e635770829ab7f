"""A `Reader` decides which of the threads that wait for answers reads the socket, for itself and for the others.

    call ──► send ──► is somebody reading? ── no ──► read until mine has come, then let another one read
                                           └─ yes ─► sleep until the reader wakes me

A lone thread pays for no switch to another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.wakeup import Wakeup
from phalanx._comm.control.pending_call import PendingCall

PollOnce = Callable[[float], None]
"""A function that waits so many seconds for something to read, and reads it."""


class Reader:
    """It gives threads their turn to read. `lock` guards `calls`, those that are not answered, by number."""

    def __init__(self, lock: threading.Lock, calls: Mapping[int, PendingCall]) -> None:
        self._lock = lock
        self._calls = calls
        self._thread: int | None = None  # the one that reads
        self.turn = threading.Lock()  # that thread has it
        self.wakeup: Wakeup | None = None  # for the thread that reads
        self.is_closed = False

    def wait(self, call: PendingCall, deadline: Deadline, poll_once: PollOnce) -> None:
        """Read until the call is over, or sleep until the thread that reads says so; it may be too early."""
        if not self.turn.acquire(blocking=False):
            wake = threading.Lock()
            wake.acquire()
            call.wake = wake
            if not self.turn.acquire(blocking=False):  # a reader that stopped before it could see that we wait
                if not call.is_over:
                    wake.acquire(timeout=min(deadline.left_s, 0.5))
                call.wake = None
                return
            call.wake = None
        try:
            self._thread = threading.get_ident()
            while not call.is_over and not deadline.passed and not self.is_closed:
                poll_once(deadline.left_s)
        finally:
            self._thread = None
            self.turn.release()
            self._appoint()

    def look(self, call: PendingCall, poll_once: PollOnce) -> None:
        """Read what has arrived, unless the call is over or another thread reads."""
        if not call.is_over and self.turn.acquire(blocking=False):
            try:
                poll_once(0.0)
            finally:
                self.turn.release()
                self._appoint()

    def read_for(self, limit_s: float, poll_once: PollOnce) -> None:
        """Read once, if no other thread does; wait so long at most for the turn, and for something to read."""
        if self.turn.acquire(timeout=limit_s):
            try:
                self._thread = threading.get_ident()
                poll_once(limit_s)
            finally:
                self._thread = None
                self.turn.release()

    def awaken(self, call: PendingCall) -> None:
        """Let the thread that waits for the call see that it is over."""
        if call.wake is not None:
            _release(call.wake)
        elif self._thread is not None and self._thread != threading.get_ident() and self.wakeup is not None:
            self.wakeup.ring()

    def _appoint(self) -> None:
        """Let one who waits take over, as the reader stops."""
        with self._lock:
            for call in self._calls.values():
                if call.wake is not None:
                    _release(call.wake)
                    return


def _release(lock: threading.Lock) -> None:
    """Wake whoever waits for `lock`, if nobody has."""
    try:
        lock.release()
    except RuntimeError:  # it is awake
        pass
