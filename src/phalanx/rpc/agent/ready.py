"""Wait until a socket can be read.

The core looks for some microseconds before it sleeps: what comes at once costs no change of threads. Without the core
(no compiler at installation) the kernel's poll sleeps at once, and calls work, only slower.
"""

from __future__ import annotations

import select

try:
    from phalanx._core import wait_ready as wait_ready
except ImportError:
    # Python goes back to sleep after a signal, and an interrupted thread has to check whether it may stop
    _MOST_MS = 100

    def wait_ready(fd: int, bell: int, spin_ns: int, timeout_ms: int, /) -> int:
        """Return 1 if `fd` can be read, or has an end, plus 2 for `bell`, which may be -1; 0 if neither can yet.

        It may return 0 before `timeout_ms` has passed; a negative `timeout_ms` sets no bound.
        """
        poll = select.poll()
        for number in (fd, bell):
            if number >= 0:
                poll.register(number, select.POLLIN)
        found = poll.poll(min(timeout_ms, _MOST_MS) if timeout_ms >= 0 else None)
        return sum({fd: 1, bell: 2}[number] for number, _ in found)
