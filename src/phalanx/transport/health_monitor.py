"""The thread that listens while its rank computes, waits or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.diagnostics.failure_report import FailureReport
from phalanx.diagnostics.failure_store import FailureStore
from phalanx.diagnostics.flight_recorder import Position

_EVERY_S = 0.2
_JOIN_S = 2.0  # it may hang in a store whose host was cut off


class HealthMonitor:
    """Reads the failure store five times a second: says where this rank is when asked, and when the group is over.

    `where` tells this rank's position. `is_over` looks at this host; `over` is called when the group is over here, and
    (again) with the report when it is told, and wakes whoever still waits. When the store goes, the launcher of this
    host may still tell that another one is lost.
    """

    def __init__(
        self,
        name: str,
        failure_store: FailureStore,
        where: Callable[[], Position],
        is_over: Callable[[], bool],
        over: Callable[[FailureReport | None], None],
    ) -> None:
        self._failure_store = failure_store
        self._where = where
        self._is_over = is_over
        self._over = over
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"phalanx-{name}-health-monitor", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        woken = False
        while not self._stop.wait(_EVERY_S):
            self._failure_store.report_position(self._where())
            report = self._failure_store.report()
            if report is not None:
                self._over(report)
                return
            if not woken and self._is_over():  # the report is yet to come
                woken = True
                self._over(None)

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
