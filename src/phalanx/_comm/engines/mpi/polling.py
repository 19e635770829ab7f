"""Wait for MPI with a deadline: poll without pauses at first, then with pauses."""

from __future__ import annotations

import time
from collections.abc import Callable

_SPIN_S = 50e-6  # a small message inside a host takes 2 us
_YIELD_S = 1e-3
_PAUSE_S = 50e-6


def wait_until(is_done: Callable[[], bool], look_around: Callable[[], None], timeout_s: float) -> bool:
    """Poll `is_done` until it is true, and return True, or False after `timeout_s`. It is called at least twice.

    MPI moves bytes only during calls, so pauses stay short. `look_around` is called during long waits and may raise to
    end them.
    """
    begin = time.monotonic()
    while not is_done():
        waited = time.monotonic() - begin
        if waited > timeout_s:
            return is_done()
        if waited < _SPIN_S:
            continue
        if waited < _YIELD_S:
            time.sleep(0)  # lets another process of this core run first
            continue
        look_around()
        time.sleep(_PAUSE_S)
    return True
