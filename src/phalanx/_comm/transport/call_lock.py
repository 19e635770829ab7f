"""Acquire the lock that serialises a group's collectives between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import CHECK_S
from phalanx._comm.diagnostics.failure_report import occupied


def take_call_lock(lock: threading.Lock, group: str, rank: int, timeout_s: float, check: Callable[[], None]) -> None:
    """Acquire `lock` for a collective; while others hold it, call `check`, which raises if the group has failed.

    Raises:
        PhalanxError: the error of `check`.
        DeadlineError: the other thread's collective did not end in time.
    """
    if lock.acquire(blocking=False):
        return
    deadline = Deadline.after(timeout_s)
    while True:
        check()
        if lock.acquire(timeout=min(max(deadline.left_s, 0.0), CHECK_S)):
            return
        if deadline.passed:
            raise occupied(group, rank, timeout_s)
