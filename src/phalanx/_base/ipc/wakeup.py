"""Wake a thread that sleeps in poll() from another one, and leave it something to take."""

from __future__ import annotations

import os
import queue
import sys
from typing import Generic, TypeVar

T = TypeVar("T")

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes; to a pipe it is eight bytes like any others
_READ_BYTES = 4096


class Wakeup:
    """It is a descriptor that is readable once a thread has called `ring`. No call waits, nor takes a Python lock.

    After `close` a call of `ring` does nothing.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):  # on Linux
            self._read = self._write = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Return what to wait on; -1 once this is closed."""
        return self._read

    def ring(self) -> None:
        """Make the descriptor readable."""
        try:
            os.write(self._write, _ONE)
        except OSError:  # it has been rung so often that no more fits, or nobody waits any more
            pass

    def drain(self) -> None:
        """Make the descriptor unreadable again."""
        try:
            while len(os.read(self._read, _READ_BYTES)) == _READ_BYTES:
                pass
        except OSError:  # nothing was there
            pass

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fds = {self._read, self._write} - {-1}
        self._read = self._write = -1
        for fd in fds:
            os.close(fd)


class Mailbox(Generic[T]):
    """Other threads leave messages here for a thread that waits on `fileno` besides other things."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return a descriptor that can be read when `take` has something."""
        return self._wakeup.fileno()

    def put(self, letter: T) -> None:
        """Leave something; any thread may call it."""
        self._letters.put(letter)
        self._wakeup.ring()

    def take(self) -> list[T]:
        """Return what was left, in order."""
        self._wakeup.drain()  # first, or what comes in between is not told
        return [self._letters.get_nowait() for _ in range(self._letters.qsize())]

    def close(self) -> None:
        """Let go of the descriptor."""
        self._wakeup.close()
