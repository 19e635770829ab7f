"""How one thread wakes another one that sleeps in poll(), or waits for a lock."""

from __future__ import annotations

import os
import threading


def new_wakeup() -> tuple[int, int]:
    """Return a pipe whose first end is readable once somebody has written to it with `ring`; nothing blocks."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def ring(fds: tuple[int, int] | None) -> None:
    """Make it readable."""
    if fds is not None:
        try:
            os.write(fds[1], b"x")
        except BlockingIOError:  # it is signalled already
            pass


def drain(fds: tuple[int, int] | None) -> None:
    """Make it unreadable again."""
    if fds is not None:
        try:
            while len(os.read(fds[0], 4096)) == 4096:
                pass
        except BlockingIOError:
            pass


def release(lock: threading.Lock) -> None:
    """Wake whoever waits for `lock`, if nobody has."""
    try:
        lock.release()
    except RuntimeError:  # it is awake
        pass
