"""Turn signals into bytes on a pipe, which an event loop handles between two events."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def caught_signals(numbers: Iterable[int]) -> Iterator[int]:
    """Yield a descriptor that delivers each arriving signal as a byte, its number; restore the handlers afterwards.

    A signal that the parent process ignored (nohup, a background job) stays ignored. Call this in the main thread only.
    """
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    before = {number: signal.getsignal(number) for number in numbers}
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda signum, frame: None)
        yield read
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        os.close(read)
        os.close(write)


def read_signals(fd: int) -> list[int]:
    """Return the signals that have arrived."""
    try:
        return list(os.read(fd, 4096))
    except BlockingIOError:
        return []
