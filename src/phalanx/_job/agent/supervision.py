"""Decide how to react to the events of a job: a state machine that uses no clock and no processes.

                       a rank fails            time is over, or the user's signal     all have exited
    running ──────────────────────────▶ failing ─────────────────────▶ stopping ─────────────▶ finished
       │                                                                  │ grace over, or a second signal
       ├── all ranks exit with 0 ─▶ finished                              └──▶ killing ─▶ finished
       └── some exit with 0, others not within the exit timeout ─▶ stopping

After a failure the other ranks have a moment to report their own errors before they are stopped. These reports
distinguish a rank that died without a report from the ranks that raised because of its death.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx._base.loss_detection import HOST_LOSS_GRACE_S, REPORT_GRACE_S, SAME_SIGNAL_S, SAME_SIGTERM_S
from phalanx._base.processes import ENDING_SIGNALS, RELAYED_SIGNALS
from phalanx._job.agent.failure import ExceptionReport, Exit, HostLoss, RankFailure, decide_failures

_REPORT_AFTER_S = (10.0, 60.0, 600.0, 3600.0)  # then every hour


@dataclass(frozen=True)
class Signal:
    """Send `signum` to `ranks`; if `group` is set, to their process groups, as a terminal would.

    `is_relayed`: the agent has received the signal, and the ranks may have received it, too.
    """

    signum: int
    ranks: tuple[int, ...]
    group: bool
    is_relayed: bool = False


@dataclass(frozen=True)
class Kill:
    """Kill every process of the job with SIGKILL."""


@dataclass(frozen=True)
class ReportStragglers:
    """Print the ranks that are still running `waited_s` after the latest exit."""

    waited_s: float


Action = Signal | Kill | ReportStragglers


def decide_delay_s(signum: int, *, received_here: bool) -> float:
    """Return how long a host delays a signal that it relays, because every process of the job may receive it anyway.

    The delay is longer for SIGTERM from another host, because a scheduler may send SIGTERM to this host a moment later.
    """
    return SAME_SIGNAL_S if received_here or signum != signal.SIGTERM else SAME_SIGTERM_S


@dataclass
class Supervision:
    """`Supervision` decides when to stop an attempt's ranks. `on_…` methods take events, and may return actions."""

    world_size: int
    shutdown_timeout_s: float
    exit_timeout_s: float | None = None
    exits: dict[int, Exit] = field(default_factory=dict)
    reports: dict[int, ExceptionReport] = field(default_factory=dict)
    lost: dict[int, HostLoss] = field(default_factory=dict)  # the ranks whose host is lost
    started: set[int] = field(default_factory=set)
    abandoned: set[int] = field(default_factory=set)  # the ranks that were not forked because the job ended
    retired: set[int] = field(default_factory=set)  # the ranks without which an elastic job continues
    sent: dict[int, float] = field(default_factory=dict)  # by signal: when it was first sent to stop ranks
    interrupted: int | None = None
    killed: tuple[int, ...] = ()  # the ranks that did not exit within the grace period
    overdue: tuple[int, ...] = ()  # the ranks that did not exit within the exit timeout
    report_grace_s: float = REPORT_GRACE_S
    is_alone: bool = True  # no rank is on another host
    is_saving: bool = False  # the ranks of an elastic job save their state and exit, without a time limit
    phase: str = "running"
    next_due: float | None = None
    _first_end: float | None = None
    _last_end: float = 0.0
    _num_reports: int = 0  # the number of reports about the remaining ranks since the last exit
    _running_rank: int = 0  # a rank that was running at the last check

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not exited, including ranks that have not started."""
        return tuple(rank for rank in range(self.world_size) if self.is_running(rank))

    def is_running(self, rank: int) -> bool:
        """Return whether this rank has not exited; it may not have started."""
        gone = (self.exits, self.abandoned, self.lost, self.retired)
        return rank < self.world_size and not any(rank in ranks for ranks in gone)

    @property
    def has_running(self) -> bool:
        """Return whether any rank is running; constant time while the rank found last is running."""
        if not self.is_running(self._running_rank):
            others = itertools.chain(range(self._running_rank, self.world_size), range(self._running_rank))
            self._running_rank = next(filter(self.is_running, others), self._running_rank)
        return self.is_running(self._running_rank)

    @property
    def finished(self) -> bool:
        return not self.has_running

    @property
    def failures(self) -> list[RankFailure]:
        """Return the failed ranks, the likely root cause first."""
        return decide_failures(self.exits, self.reports, self.sent, self.lost)

    def is_stopped_by_user(self, report: ExceptionReport) -> bool:
        """Return whether the report only reflects that the user stopped the job: by Ctrl-C, or through a lost peer."""
        return self.interrupted is not None and not {"KeyboardInterrupt", "PeerLostError"}.isdisjoint(report.types)

    def on_started(self, rank: int) -> None:
        self.started.add(rank)

    def on_abandoned(self, rank: int) -> None:
        """Record that `rank` will not be started."""
        self.abandoned.add(rank)

    def on_lost(self, rank: int) -> None:
        """Record the exit of `rank` in an elastic job that continues, and discard its report."""
        self.reports.pop(rank, None)

    def on_retired(self, rank: int) -> None:
        """Record that `rank` is lost, and that an elastic job continues without it."""
        self.retired.add(rank)

    def on_replaced(self, rank: int) -> None:
        """Record that `rank` is lost, and that a replacement is forked."""
        self.started.discard(rank)
        self.retired.discard(rank)

    def on_exit(self, exit: Exit) -> list[Action]:
        """Decide how to react to the exit of a rank."""
        self.exits[exit.rank] = exit
        if not exit.is_orderly or (exit.status and exit.rank in self.reports):
            return self._await_reports(exit.at)
        if self._first_end is None:
            self._first_end = exit.at
        self._last_end, self._num_reports = exit.at, 0
        if self.phase == "running":
            self._wait_for_rest()
        return []

    def on_report(self, report: ExceptionReport, now: float) -> list[Action]:
        """Decide how to react to a rank's report of an exception; the rank may exit much later."""
        self.reports.setdefault(report.rank, report)
        return self._await_reports(now)

    def on_host_lost(self, ranks: Iterable[int], loss: HostLoss, now: float) -> list[Action]:
        """Decide how to react to the loss of these ranks' host."""
        self.lost.update({rank: loss for rank in ranks if rank not in self.exits and rank not in self.abandoned})
        return self._await_reports(now, HOST_LOSS_GRACE_S) if self.lost else []

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """Decide how to react to a signal to the agent: end the job, or relay the signal."""
        if signum not in ENDING_SIGNALS:
            is_for_group = signum not in (signal.SIGUSR1, signal.SIGUSR2)
            return [Signal(signum, self.running, is_for_group, is_relayed=signum in RELAYED_SIGNALS)]
        if self.phase == "stopping" or not self.started:
            self.interrupted = self.interrupted or signum
            return self._kill(now)
        if self.phase == "killing":
            return []
        self.interrupted = signum
        if signum == signal.SIGPIPE:
            return self._stop(signal.SIGTERM, now)
        delay_s = decide_delay_s(signum, received_here=self.is_alone)
        return self._stop(signum, now, delay_s)

    def on_time(self, now: float) -> list[Action]:
        """Return the actions that are due; the agent calls this at `next_due`."""
        if self.next_due is None or now < self.next_due:
            return []
        if self.phase == "running":
            return self._report_rest(now)
        if self.phase == "failing":
            return self._stop(signal.SIGTERM, now)
        if self.phase == "stopping":
            self.killed = self.running
            return self._kill(now)
        return []

    def _wait_for_rest(self) -> None:
        """Plan when to report the remaining ranks to the user, or to stop them after the exit timeout."""
        assert self._first_end is not None
        last = len(_REPORT_AFTER_S) - 1
        times = [self._last_end + _REPORT_AFTER_S[min(self._num_reports, last)] * max(1, self._num_reports - last + 1)]
        if self.exit_timeout_s is not None:
            times.append(self._first_end + self.exit_timeout_s)
        self.next_due = min(times) if self.has_running else None

    def _report_rest(self, now: float) -> list[Action]:
        assert self._first_end is not None
        if self.exit_timeout_s is not None and now >= self._first_end + self.exit_timeout_s:
            self.overdue = self.running
            return [ReportStragglers(now - self._last_end), *self._stop(signal.SIGTERM, now)]
        self._num_reports += 1
        self._wait_for_rest()
        return [ReportStragglers(now - self._last_end)]

    def _await_reports(self, now: float, span_s: float = 0.0) -> list[Action]:
        if self.phase == "running" and not self.is_saving:
            self.phase, self.next_due = "failing", now + max(span_s, self.report_grace_s)
        return []

    def _stop(self, signum: int, now: float, delay_s: float | None = None) -> list[Action]:
        """Send `signum` to the ranks; the grace period begins after `delay_s`, the zygote's delay."""
        self.phase, self.next_due = "stopping", now + (delay_s or 0.0) + self.shutdown_timeout_s
        self.sent.setdefault(signum, now)
        # Ctrl-C goes to whole process groups, as programs expect from a terminal. Other signals go only to the rank,
        # which can then stop its own children cleanly. A rank that has reported is already exiting.
        ranks = tuple(rank for rank in self.running if rank not in self.reports)
        is_for_group = signum == signal.SIGINT
        return [Signal(signum, ranks, is_for_group, is_relayed=delay_s is not None)] if ranks else []

    def _kill(self, now: float) -> list[Action]:
        self.phase, self.next_due = "killing", None
        self.sent.setdefault(signal.SIGKILL, now)
        return [Kill()]
