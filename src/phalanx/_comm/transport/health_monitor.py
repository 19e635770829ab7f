"""Watch for failures on a thread while this rank computes, waits or hangs; all groups of a store share the thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import ClassVar

from phalanx._base.loss_detection import CHECK_S
from phalanx._comm.diagnostics.failure_report import FailureReport
from phalanx._comm.diagnostics.failure_signals import FailureSignals
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition

_JOIN_S = 2.0  # the thread may hang in a store whose host was cut off


class HealthMonitor:
    """A `HealthMonitor` publishes this rank's position when another rank requests it, and detects the group's failure.

    `where` returns this rank's position. `is_over` returns whether the group has failed on this host. `over` wakes all
    waiting threads: it is called with None when the group has failed here, and with the report when that arrives.
    This host, and its launcher's file of lost hosts, are checked five times a second; the store is read only after a
    failure signal.
    """

    def __init__(
        self,
        failure_store: FailureStore,
        where: Callable[[], RankPosition],
        is_over: Callable[[], bool],
        over: Callable[[FailureReport | None], None],
    ) -> None:
        self._failure_store = failure_store
        self._where = where
        self._is_over = is_over
        self._over = over
        self._woken = False
        self._has_checked = False
        self._check_lock = threading.RLock()
        self._is_closed = False
        self._listener = _Listener.of(failure_store.signals, self)

    def check(self, signals: set[str]) -> None:
        """Check whether the group has failed. The listener's thread calls this, with the signalled groups' keys."""
        with self._check_lock:
            if self._is_closed:
                return
            # `signals` lacks the signals that were sent before the first check.
            if not self._has_checked or self._failure_store.group_key in signals:
                self._failure_store.report_position(self._where())
                report = self._failure_store.report()
                self._has_checked = True
            else:
                report = self._failure_store.report_on_host()
            if report is not None:
                self._is_closed = True
                self._over(report)
            elif not self._woken and self._is_over():  # the report has not arrived yet
                self._woken = True
                self._over(None)

    def close(self) -> None:
        self._listener.remove(self)
        if self._check_lock.acquire(timeout=_JOIN_S):
            self._is_closed = True
            self._check_lock.release()


class _Listener:
    """A `_Listener` is the thread that calls the monitors of one store."""

    _lock = threading.Lock()
    _running: ClassVar[dict[tuple[int, int], _Listener]] = {}  # the listeners, by process and signals

    def __init__(self, signals: FailureSignals) -> None:
        self._signals = signals
        self._monitors: list[HealthMonitor] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="phalanx-health-monitor", daemon=True)

    @classmethod
    def of(cls, signals: FailureSignals, monitor: HealthMonitor) -> _Listener:
        """Return the running listener of the store of `signals`, with `monitor` among its monitors."""
        with cls._lock:
            key = (os.getpid(), id(signals))
            listener = cls._running.get(key)
            if listener is None:
                listener = cls._running[key] = cls(signals)
                listener._thread.start()
            listener._monitors = [*listener._monitors, monitor]
            return listener

    def remove(self, monitor: HealthMonitor) -> None:
        """Remove `monitor`; the thread ends after the last monitor is removed."""
        with self._lock:
            self._monitors = [one for one in self._monitors if one is not monitor]
            if self._monitors or self._stop.is_set():
                return
            self._stop.set()
            self._running.pop((os.getpid(), id(self._signals)), None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _listen(self) -> None:
        while not self._stop.wait(CHECK_S):
            signals = self._signals.receive()
            for monitor in self._monitors:
                monitor.check(signals)
        self._signals.close()
