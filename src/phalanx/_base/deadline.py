"""A `Deadline` is a point in time by which something must have happened, on a clock that a test can turn."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

Clock = Callable[[], float]


@dataclass(frozen=True)
class Deadline:
    """It is a point on a monotonic clock; a span is given at the door and becomes a deadline inside.

    `timeout_s` is kept for messages: people recognise the span that they set.
    """

    at: float
    timeout_s: float
    clock: Clock = field(default=time.monotonic, repr=False, compare=False)

    @classmethod
    def after(cls, timeout: float | timedelta | None, clock: Clock = time.monotonic) -> Deadline:
        """Return the deadline `timeout` (seconds or a timedelta) from now; None never comes."""
        if timeout is None:
            return cls(math.inf, math.inf, clock)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if math.isnan(seconds) or seconds < 0:
            raise ValueError(f"timeout must be zero or more seconds, got {timeout!r}")
        return cls(clock() + seconds, seconds, clock)

    @property
    def left_s(self) -> float:
        """Return the seconds that are left, never below zero."""
        return max(0.0, self.at - self.clock())

    @property
    def passed(self) -> bool:
        return self.clock() >= self.at

    def wait_until(
        self,
        is_so: Callable[[], object],
        pause_s: float,
        longest_pause_s: float = 0.0,
        *,
        look_around: Callable[[], object] = lambda: None,
    ) -> bool:
        """Ask `is_so` again and again, with pauses; return True once it is so, and False if the time has come first.

        It is asked at least once, and once more after the time has come. Each pause is `pause_s`, or twice the one
        before, up to `longest_pause_s`. Before each pause `look_around` is called, which may raise to end the waiting.
        """
        while not is_so():
            left_s = self.left_s
            if left_s <= 0.0:
                return False
            look_around()
            time.sleep(min(pause_s, left_s))
            pause_s = max(pause_s, min(2.0 * pause_s, longest_pause_s))
        return True


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait for threads to end, but not for the one that calls, for so long in all."""
    deadline = Deadline.after(timeout_s)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(deadline.left_s)


def timeout_ns(timeout_s: float) -> int:
    """Return seconds as the core counts them; "for ever" is 292 years."""
    return int(timeout_s * 1e9) if timeout_s < 9e9 else (1 << 63) - 1
