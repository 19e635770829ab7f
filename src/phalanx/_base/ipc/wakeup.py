"""Wake a thread that sleeps in poll(), and send it messages, from another thread."""

from __future__ import annotations

import os
import queue
import sys
from typing import Generic, TypeVar

T = TypeVar("T")

_ONE = (1).to_bytes(8, sys.byteorder)  # the value for an eventfd; for a pipe any eight bytes
_READ_BYTES = 4096


class Wakeup:
    """A `Wakeup` is a descriptor that is readable after a call of `ring`. No method blocks or acquires a Python lock.

    After `close`, `ring` does nothing.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):  # on Linux
            self._read = self._write = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once this is closed."""
        return self._read

    def ring(self) -> None:
        """Make the descriptor readable."""
        try:
            os.write(self._write, _ONE)
        except OSError:  # the pipe is full, or closed
            pass

    def drain(self) -> None:
        """Make the descriptor unreadable again."""
        try:
            while len(os.read(self._read, _READ_BYTES)) == _READ_BYTES:
                pass
        except OSError:  # it was not readable
            pass

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fds = {self._read, self._write} - {-1}
        self._read = self._write = -1
        for fd in fds:
            os.close(fd)


class Mailbox(Generic[T]):
    """A `Mailbox` passes messages from other threads to a thread that polls `fileno`."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive_all` has messages."""
        return self._wakeup.fileno()

    def put(self, letter: T) -> None:
        """Add a message; any thread may call this."""
        self._letters.put(letter)
        self._wakeup.ring()

    def receive_all(self) -> list[T]:
        """Return the messages, in order."""
        self._wakeup.drain()  # first, so that a message added meanwhile rings again
        return [self._letters.get_nowait() for _ in range(self._letters.qsize())]

    def close(self) -> None:
        """Close the descriptor."""
        self._wakeup.close()
