"""Make `torch.futures.collect_all` and `wait_all` work over calls.

PyTorch's functions wait in C++, where we cannot see it: their callbacks would run in whatever thread reads an answer,
which may hold a lock that they want. They also take an error that was set from Python for a result, and wait for all
the others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.futures import Future

from phalanx.rpc.agent.reading import Answer
from phalanx.rpc.remote_error import error_of, set_error


def has_calls(futures: Sequence[Any]) -> bool:
    """Return whether a call is among the futures."""
    return any(isinstance(one, Answer) for one in futures)


def collect_all(futures: Sequence[Any]) -> Future[Any]:
    """Return a future of all futures, done when they are, or when the first one fails, with its error."""
    return _Collection(futures).future


class _Collection:
    def __init__(self, futures: Sequence[Any]) -> None:
        self.future: Answer[Any] = Answer()
        self._futures = list(futures)
        self._left = len(self._futures)
        self._lock = threading.Lock()  # it guards the count; callbacks run without it
        for one in self._futures:
            one.add_done_callback(self._hear)

    def _hear(self, done: Any) -> None:
        try:
            done.value()
        except BaseException:
            if self._count_down(to=0):
                set_error(self.future, partial(error_of, done))
        else:
            if self._count_down():
                self.future.set_result(self._futures)

    def _count_down(self, to: int | None = None) -> bool:
        """Count one future, or all with `to=0`; return whether the count has reached its end by that."""
        with self._lock:
            before = self._left
            self._left = max(0, before - 1 if to is None else to)
            return bool(before) and not self._left
