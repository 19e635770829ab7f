"""Wait until a socket can be read; spin first, as long as spinning succeeds.

The C core polls for up to 120 µs before it sleeps: an answer that arrives meanwhile costs no thread switch.
Without the core (no compiler at installation) the kernel's poll sleeps at once, and calls are slower.
"""

from __future__ import annotations

import select
import threading

try:
    from phalanx._core import wait_ready as wait_ready
except ImportError:
    # Python resumes the poll after a signal, but the thread must first check whether the signal interrupts it
    _MOST_MS = 100

    def wait_ready(fd: int, bell: int, spin_ns: int, timeout_ms: int, /) -> int:
        """Return 1 if `fd` is readable or at end of file, plus 2 if `bell` is (-1 for none); 0 if neither is.

        It may return 0 before `timeout_ms` has passed; a negative `timeout_ms` sets no bound.
        """
        poll = select.poll()
        for number in (fd, bell):
            if number >= 0:
                poll.register(number, select.POLLIN)
        found = poll.poll(min(timeout_ms, _MOST_MS) if timeout_ms >= 0 else None)
        return sum({fd: 1, bell: 2}[number] for number, _ in found)


_SPIN_NS = 120_000
_MOST_MISSES = 8
_spinning = threading.Lock()  # one thread of a process spins at a time


class SpinWait:
    """A `SpinWait` spins before it sleeps, if no other thread of the process does; after several misses, rarely."""

    def __init__(self) -> None:
        self._has_spun = False
        self._misses = 0  # waits since spinning last succeeded

    def wait(self, fd: int, bell: int = -1, most_ms: int = -1) -> int:
        """Return 1 if `fd` can be read, plus 2 if `bell` can; 0 if neither, after spinning, a timeout or a signal."""
        may_spin = self._misses < _MOST_MISSES or self._misses % _MOST_MISSES == 0
        if may_spin and not self._has_spun and _spinning.acquire(blocking=False):
            try:
                ready = wait_ready(fd, bell, _SPIN_NS, 0)
            finally:
                _spinning.release()
            self._has_spun = not ready
            self._misses = 0 if ready else self._misses
            return ready
        self._has_spun = False
        self._misses += 1
        return wait_ready(fd, bell, 0, most_ms)
