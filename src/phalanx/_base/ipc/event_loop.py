"""An `EventLoop` waits for several sources at once, and then calls each of them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_LONGEST_WAIT_S = 3600.0  # poll takes milliseconds as an int


def _never() -> float | None:
    return None


@dataclass(frozen=True)
class Source:
    """A `Source` is a set of descriptors or a time that an event loop waits for.

    All arguments but `handle` are called before each wait.

    Arguments:
        handle: called after each wait, with all ready descriptors, including those of other sources.
        readable: descriptors to read from.
        writable: descriptors to write to as soon as they accept data.
        due: when to continue without a ready descriptor, in seconds of `time.monotonic`; None for never.
    """

    handle: Callable[[set[int]], object]
    readable: Callable[[], Iterable[int]] = tuple
    writable: Callable[[], Iterable[int]] = tuple
    due: Callable[[], float | None] = _never


class EventLoop:
    """An `EventLoop` waits until one of its sources is ready, and then calls all of them, in order."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def turn(self, limit_s: float = _LONGEST_WAIT_S) -> None:
        """Wait once, for at most `limit_s` seconds, and then call all sources."""
        events: dict[int, int] = {}
        for source in self._sources:
            for fd in source.readable():
                events[fd] = events.get(fd, 0) | select.POLLIN
            for fd in source.writable():
                events[fd] = events.get(fd, 0) | select.POLLOUT
        poll = select.poll()
        for fd, wanted in events.items():
            poll.register(fd, wanted)
        times = [at for source in self._sources if (at := source.due()) is not None]
        left_s = min(limit_s, _LONGEST_WAIT_S, *(at - time.monotonic() for at in times))
        ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1 if left_s > 0 else 0)}
        for source in self._sources:
            source.handle(ready)
