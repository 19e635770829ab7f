"""A `ManualClock` advances only when a test calls `turn`."""

from __future__ import annotations


class ManualClock:
    """Stand in for `time.monotonic` wherever a `Clock` is accepted: `Deadline.after(5, clock=ManualClock())`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def turn(self, seconds: float) -> None:
        """Advance the clock by `seconds`.

        Raises:
            ValueError: `seconds` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot be turned back: got {seconds} seconds")
        self._now += seconds
