"""What to do about each thing that happens to a job: a state and its transitions, without clock or process.

                       a rank fails              settled, or the user's signal          all gone
    running ──────────────────────────▶ settling ────────────────────▶ stopping ─────────────▶ finished
       │                                                                  │ grace over, or a second signal
       └── all ranks end with 0 ─▶ finished                             └──▶ killing ─▶ finished

A failing job settles for a moment before its other ranks are stopped, so that they can still say what they saw: the
rank that died in silence is told from those that raised because of it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from phalanx.launch.failure import Exit, Failure, Report, decide_failures
from phalanx.launch.processes import ENDING_SIGNALS

SETTLE_S = 0.2


@dataclass(frozen=True)
class Signal:
    """Send `signum` to `ranks`; to their process groups, as a terminal would, if `group`."""

    signum: int
    ranks: tuple[int, ...]
    group: bool


@dataclass(frozen=True)
class Kill:
    """SIGKILL every process of the job."""


Action = Signal | Kill


@dataclass
class Supervision:
    """One attempt at the job. Every method takes what happened and returns what to do now."""

    world_size: int
    grace_s: float
    exits: dict[int, Exit] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    abandoned: set[int] = field(default_factory=set)  # the job was told to end before they were forked
    sent: dict[int, float] = field(default_factory=dict)
    interrupted: int | None = None
    killed: tuple[int, ...] = ()  # the ranks that outlived the grace period
    phase: str = "running"
    next_due: float | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended, or are still to be started."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.exits and rank not in self.abandoned)

    @property
    def finished(self) -> bool:
        """Whether no rank is left."""
        return not self.running

    @property
    def failures(self) -> list[Failure]:
        """The failed ranks, the first cause in front."""
        return decide_failures(self.exits, self.reports, self.sent)

    def on_started(self, rank: int) -> None:
        """The process of `rank` exists."""
        self.started.add(rank)

    def on_abandoned(self, rank: int) -> None:
        """`rank` is not going to be started any more."""
        self.abandoned.add(rank)

    def on_exit(self, exit: Exit) -> list[Action]:
        """The process of a rank has ended."""
        self.exits[exit.rank] = exit
        return self._settle(exit.at) if exit.status != 0 else []

    def on_report(self, report: Report, now: float) -> list[Action]:
        """A rank tells of an exception; its process may take its time to end."""
        self.reports.setdefault(report.rank, report)
        return self._settle(now)

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """The agent received a signal: one that ends the job, or one to pass on."""
        if signum not in ENDING_SIGNALS:
            return [Signal(signum, self.running, group=signum not in (signal.SIGUSR1, signal.SIGUSR2))]
        if self.phase == "stopping" or not self.started:
            self.interrupted = self.interrupted or signum
            return self._kill(now)
        if self.phase == "killing":
            return []
        self.interrupted = signum
        return self._stop(signal.SIGTERM if signum == signal.SIGPIPE else signum, now)

    def on_time(self, now: float) -> list[Action]:
        """To be called when `next_due` has come."""
        if self.next_due is None or now < self.next_due:
            return []
        if self.phase == "settling":
            return self._stop(signal.SIGTERM, now)
        if self.phase == "stopping":
            self.killed = self.running
            return self._kill(now)
        return []

    def _settle(self, now: float) -> list[Action]:
        if self.phase == "running":
            self.phase, self.next_due = "settling", now + SETTLE_S
        return []

    def _stop(self, signum: int, now: float) -> list[Action]:
        self.phase, self.next_due = "stopping", now + self.grace_s
        self.sent.setdefault(signum, now)
        # Ctrl-C goes to whole groups, as a terminal sends it: programs expect that. Other signals go to the rank alone,
        # which must get the chance to stop its own children in order. A rank that reported is ending already.
        ranks = tuple(rank for rank in self.running if rank not in self.reports)
        return [Signal(signum, ranks, group=signum == signal.SIGINT)] if ranks else []

    def _kill(self, now: float) -> list[Action]:
        self.phase, self.next_due = "killing", None
        self.sent.setdefault(signal.SIGKILL, now)
        return [Kill()]
