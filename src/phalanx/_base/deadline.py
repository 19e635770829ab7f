"""A `Deadline` is a point in time until which to wait, on a clock that a test can replace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

Clock = Callable[[], float]


@dataclass(frozen=True)
class Deadline:
    """A `Deadline` is a point on a monotonic clock; public functions take a span and convert it to a deadline.

    `timeout_s` is kept for messages: users recognise the span that they set.
    """

    at: float
    timeout_s: float
    clock: Clock = field(default=time.monotonic, repr=False, compare=False)

    @classmethod
    def after(cls, timeout: float | timedelta | None, clock: Clock = time.monotonic) -> Deadline:
        """Return the deadline `timeout` (seconds or a timedelta) from now; None means never."""
        if timeout is None:
            return cls(math.inf, math.inf, clock)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if math.isnan(seconds) or seconds < 0:
            raise ValueError(f"timeout must be zero or more seconds, got {timeout!r}")
        return cls(clock() + seconds, seconds, clock)

    @property
    def left_s(self) -> float:
        """Return the seconds left, at least zero."""
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
        check: Callable[[], object] = lambda: None,
    ) -> bool:
        """Poll `is_so`; return True once it is true, or False if the deadline has passed.

        `is_so` is called at least once, and once more after the deadline. Pauses begin at `pause_s`, and double up to
        `longest_pause_s`. `check` is called before each pause, and may raise to end the wait.
        """
        while not is_so():
            left_s = self.left_s
            if left_s <= 0.0:
                return False
            check()
            time.sleep(min(pause_s, left_s))
            pause_s = max(pause_s, min(2.0 * pause_s, longest_pause_s))
        return True


def timeout_ns(timeout_s: float) -> int:
    """Convert seconds to the core's nanoseconds; an infinite timeout becomes 292 years."""
    return int(timeout_s * 1e9) if timeout_s < 9e9 else (1 << 63) - 1
