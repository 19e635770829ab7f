"""Take the lock that a group's collectives take in turn, one thread after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import LOOK_S
from phalanx._comm.diagnostics.failure_report import occupied


def take_call_lock(lock: threading.Lock, group: str, rank: int, timeout_s: float, check: Callable[[], None]) -> None:
    """Take `lock` for a collective; `check`, which raises where the group is over, is called while others have it.

    Raises:
        PhalanxError: what `check` raises.
        DeadlineError: the other thread's collective was not over in time.
    """
    if lock.acquire(blocking=False):
        return
    deadline = Deadline.after(timeout_s)
    while True:
        check()
        if lock.acquire(timeout=min(max(deadline.left_s, 0.0), LOOK_S)):
            return
        if deadline.passed:
            raise occupied(group, rank, timeout_s)
