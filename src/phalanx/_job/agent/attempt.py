"""An `Attempt` runs a job's ranks on this host once: it passes events to the deciders, and executes their actions.

              ┌─ Supervision  decisions about the ranks            know nothing
              ├─ Elastic      decisions after a loss               of processes or clocks
Attempt ──────┤
              ├─ HostRanks    the processes of this host's ranks
              ├─ RankNumbers  the rank of each process, and the store for the ranks' rendezvous
              ├─ HostLink     the link to the other hosts: none, all of them (if this host leads), or the first
              ├─ Requests     requests at the agent's socket
              └─ SilentRanks  ranks that make the others wait
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.diagnostics.observer import GroupInfo, GroupLog, Observer
from phalanx._comm.diagnostics.progress_page import RankProgress, read_page
from phalanx._job.agent import limits
from phalanx._job.agent.elastic import Elastic
from phalanx._job.agent.elastic_actions import (
    Abandon,
    BeginGeneration,
    Continue,
    DropHost,
    ElasticAction,
    Evict,
    GiveUp,
    PrepareHost,
    Print,
    Retire,
    SendGeneration,
    SendToRank,
)
from phalanx._job.agent.elastic_links import ElasticLinks
from phalanx._job.agent.failure import ExceptionReport, Exit, summarise
from phalanx._job.agent.host_link import HostLink
from phalanx._job.agent.host_ranks import HostRanks
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.rank_numbers import RankNumbers
from phalanx._job.agent.requests import Requests
from phalanx._job.agent.supervision import Action, Kill, ReportStragglers, Supervision, decide_delay_s
from phalanx._job.agent.target import is_elastic
from phalanx._job.agent.watch import SilentRanks, describe_stragglers

_READ_S = 0.05  # maximum time spent on output before signals and events are handled
_REPORT_END_AFTER_S = 1.0


class Attempt:
    """An `Attempt` forks this host's ranks and supervises them until all have exited."""

    def __init__(self, plan: JobPlan, host: HostResources, restart_count: int, link: HostLink | None = None) -> None:
        """Create an attempt. `link` connects to the job's other hosts; None means a job on one host."""
        self.plan = plan
        self.host = host
        self.restart_count = restart_count
        self.link = link or HostLink(plan)
        self.place = self.link.place  # at the start of the attempt; `numbers.part.place` is the current one
        self.state = self.link.make_supervision()
        self.elastic = self.link.make_elastic()
        self.numbers = RankNumbers(plan, host, restart_count, self.link)
        self.ranks = HostRanks(plan, host, self.place, self.state, self.elastic, self.numbers, self)
        self.links = ElasticLinks()
        self.flights = FlightRecorders()
        self.pages = Pages()
        # by host name: its clock offset in seconds, and one core's copy speed in bytes per second
        self.report_hosts: dict[str, tuple[float, float]] = {}
        self.report_folder = os.path.abspath(plan.settings.report) if plan.settings.report is not None else ""
        self._requests = Requests(self)
        self._silent = SilentRanks(self)
        self._report_end_at: float | None = None
        self._loss_reports: dict[int, ExceptionReport] = {}  # by slot: exceptions that the job may survive
        self._signalled_hosts: set[str] = set()  # the hosts that have received a signal that ends the job
        self.link.attach(self)

    def run(self) -> None:
        """Run until all ranks and all other descendants of the zygote have exited, and all their output is queued.

        The flight records in `flights` stay mapped until `close`.

        Raises:
            LaunchError: a rank cannot be started, or a log file of the first attempt cannot be created.
        """
        self.elastic.is_script_elastic = is_elastic(self.plan.settings.target)
        self.elastic.began_at = time.monotonic()
        self.link.begin()
        self.host.errors.begin(self.restart_count, self.place.num_ranks)
        self.host.logs.begin(self.place.ranks, self.restart_count)
        self.numbers.open()
        try:
            self.ranks.fork_some()
            loop = self._make_loop()
            self._run_until(loop, lambda: (self.state.finished and not self.host.arrived) or self.link.has_left)
            self._sweep()
            self._run_until(loop, lambda: self.ranks.is_swept and self.link.is_swept)
            if not self.ranks.zygote_lost:
                self.host.pump.drain()
            self._release_tracebacks()
        finally:
            self._requests.close()
            self.links.close()
            self.ranks.close()
            self.numbers.close()
        self.link.end(self)

    def become_leader(self, plan: JobPlan, link: HostLink, state: Supervision, elastic: Elastic) -> None:
        """Lead the job from now on, because the previous leader is lost."""
        self.plan, self.link, self.state, self.elastic = plan, link, state, elastic
        self.numbers.exchange_link(link)
        self.ranks.exchange_deciders(state, elastic)
        link.attach(self)

    def _make_loop(self) -> EventLoop:
        """Return the event loop. The order of its sources matters: a rank's messages are handled before its exit."""
        host, links = self.host, self.links
        return EventLoop(
            host.watch_signals(self.on_signal),
            Source(self._read_output, lambda: host.pump.pipes, due=lambda: host.pump.next_due),
            Source(lambda ready: self.link.receive(ready), lambda: self.link.fds, due=lambda: self.link.due),
            Source(self._requests.receive, lambda: host.agent_socket.fds),
            Source(self._receive_from_links, lambda: links.fds, lambda: links.waiting),
            Source(self._receive_reports, lambda: (self.ranks.reports.fileno(),)),
            Source(self.ranks.receive_events, self._control_fds, self._waiting_control_fds),
            Source(self._on_turn, due=self._find_due),
            host.watch_display(),
        )

    def _run_until(self, loop: EventLoop, done: Callable[[], bool]) -> None:
        while not done() and not self.ranks.zygote_lost:
            loop.turn()

    def _control_fds(self) -> tuple[int, ...]:
        control = self.host.zygote.control
        return () if control.gone else (control.fileno(),)

    def _waiting_control_fds(self) -> tuple[int, ...]:
        return self._control_fds() if self.host.zygote.control.waiting else ()

    def _find_due(self) -> float | None:
        check = self._silent.due if self.state.phase == "running" else None
        times = (self.state.next_due, self.elastic.next_due, self.ranks.sweep_due, self._report_end_at, check)
        return min((at for at in times if at is not None), default=None)

    def _read_output(self, ready: set[int]) -> None:
        """Read the ready pipes for at most `_READ_S`; the next turn begins with those that were not read."""
        end = time.monotonic() + _READ_S
        for fd in self.host.pump.pipes:
            if fd in ready:
                self.host.pump.read(fd, self.ranks.read_reports)  # a rank reports a failure before printing it
                if time.monotonic() > end:
                    return
        self.host.pump.show_due(self.ranks.read_reports)

    def _receive_from_links(self, ready: set[int]) -> None:
        for fd in self.links.waiting:
            if fd in ready:
                self.links.send_waiting(fd)
        for fd in self.links.fds:
            if fd in ready:
                for rank, pid, message in self.links.read(fd):
                    if self.link.is_leaving:  # another host's rank may already have this slot
                        self.link.remind(rank, message)
                    else:
                        self.on_rank_message(rank, pid, message)

    def receive_from_ranks(self) -> None:
        """Process all messages that elastic ranks of this host have sent so far."""
        self._receive_from_links(set(self.links.fds))

    def _receive_reports(self, ready: set[int]) -> None:
        if self.ranks.reports.fileno() in ready:
            self.ranks.read_reports()

    def _on_turn(self, ready: set[int]) -> None:
        """Execute the due actions, and continue forking."""
        if self.host.display.reader_gone and self.state.interrupted is None:
            self.ranks.abandon_rest()
            self.host.display.print(
                f"phalanx run: stdout was closed by its reader: stopping {count_ranks(len(self.state.running))}"
            )
            self.do(self.state.on_signal(signal.SIGPIPE, time.monotonic()))
        now = time.monotonic()
        self.do(self.state.on_time(now))
        self.do_elastic(self.elastic.on_time(now))
        if self.state.phase == "running" and now >= self._silent.due:
            self._silent.check(now)
        if self.state.phase not in ("running", "failing"):
            self._release_tracebacks()
            if self._report_end_at is None and self.state.interrupted is None:
                self._report_end_at = now + _REPORT_END_AFTER_S
        if self._report_end_at is not None and now >= self._report_end_at:
            self._report_end_at = float("inf")
            self._report_end()
        self.ranks.on_time(now)
        self.ranks.fork_some()

    def _report_end(self) -> None:
        """Print the first failure now, because the other ranks may take a long time to exit."""
        failures, running = self.state.failures, len(self.state.running)
        if failures and running and self.state.interrupted is None and not self.state.overdue:
            self.host.display.print(
                f"phalanx run: rank {failures[0].rank} has failed: {summarise(failures[0])}. "
                f"The report follows when all have exited: {count_ranks(running)} may take up to "
                f"{self.state.shutdown_timeout_s:g} s"
            )

    def _release_tracebacks(self) -> None:
        """Show the buffered tracebacks, unless a failure will be printed at the end."""
        will_report = self.state.interrupted is None and not self.state.overdue and bool(self.state.failures)
        if not will_report:
            self.host.display.release()

    def on_own_start(self, rank: int, pid: int) -> None:
        """Record that a rank of this host has started, unless the job continues without this host."""
        if not self.link.is_leaving:
            self.on_started(rank, pid)

    def on_own_report(self, report: ExceptionReport) -> None:
        """Process a failure report from a rank of this host, unless the job continues without this host."""
        if not self.link.is_leaving:
            self.on_report(report)

    def on_started(self, rank: int, pid: int) -> None:
        self.state.on_started(rank)
        self.elastic.on_started(rank, pid)
        self.link.on_started(rank, pid)
        self._requests.accept_early()

    def on_ended(self, rank: int, pid: int, status: int, at: float) -> None:
        """Process the exit of a process of this host, after reading its last messages."""
        self.ranks.read_reports()
        if self.ranks.processes.pids.get(rank) != pid:
            return  # this exit was already processed
        if self.link.is_leaving:
            self.links.drop(pid)
            self.ranks.processes.lose(Exit(rank, pid, status, at))
            self.pages.drop(pid)
            return
        for _, _, message in self.links.drop(pid):
            self.on_rank_message(rank, pid, message)
        self.ranks.read_error_file(rank, pid, status, at)
        dump = self.ranks.processes.read_dump(rank)
        self.on_exit(Exit(rank, pid, status, at, self._silent.evicted.pop(pid, dump)))
        self.pages.drop(pid)

    def on_exit(self, exit: Exit) -> None:
        """Process the exit of a rank on any host, after reading its last messages."""
        # Otherwise the last rank known to have the training state may exit before others report that they have it.
        self.receive_from_ranks()
        for pid in self.ranks.processes.pids.values():
            progress = self.pages.read(pid)
            if progress is not None and progress.state is not None:
                self.elastic.on_commit(progress.state.steps)
        actions = self.elastic.on_exit(exit, time.monotonic()) if self.state.phase == "running" else None
        if self.state.phase == "failing":  # another rank has reported a failure first
            self.elastic.record_early_loss(exit)
        if actions is None:
            if self.elastic.has_trained:  # the others no longer need this rank; they may be saving, which takes time
                self.state.report_grace_s = self.state.shutdown_timeout_s
            if exit.rank in self._loss_reports:  # the job survived losses when the report arrived, and no longer does
                self.do(self.state.on_report(self._loss_reports.pop(exit.rank), time.monotonic()))
            self.do(self.state.on_exit(exit))
            return
        self.ranks.processes.lose(exit)
        self.state.on_lost(exit.rank)
        self.do_elastic(actions)

    def on_report(self, report: ExceptionReport) -> None:
        """Process a rank's failure report: a loss in an elastic job, otherwise a failure of the job."""
        actions = self.elastic.on_report(report, time.monotonic()) if self.state.phase == "running" else None
        if actions is not None:
            if self.elastic.survives_loss_of(report.rank, report.pid):  # False for a rank of a host that is joining
                self._loss_reports[report.rank] = report
                if report.traceback and not self.plan.settings.traceback:
                    self.host.display.expect(report.rank, report.traceback)
            self.do_elastic(actions)
            return
        if report.traceback and not self.plan.settings.traceback:
            if self.state.phase in ("running", "failing"):
                self.host.display.expect(report.rank, report.traceback)
            elif self.state.is_stopped_by_user(report):
                self.host.display.expect(report.rank, report.traceback, quiet=True)
            elif self.host.display.has_same(report.traceback):
                self.host.display.expect(report.rank, report.traceback)
        self.do(self.state.on_report(report, time.monotonic()))

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Process a message from an elastic rank of any host."""
        if message.get("kind") == "lost":
            self.ranks.on_reported_loss()
        self.do_elastic(self.elastic.on_message(rank, pid, message, time.monotonic()))
        self.link.on_rank_message(rank, pid, message)

    def on_signal(self, number: int, where: str = "") -> None:
        """Process a signal that this agent, or another host's agent, has received.

        `where` names the other host in messages, such as ` on node-b`; empty for a signal to this agent.
        """
        if number == signal.SIGCHLD:
            self.ranks.on_child_signal()
            return
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks stop and continue with the agent
            if self.numbers.part.place.num_nodes > 1:  # the other hosts would report this host as lost
                self.host.display.print(
                    "phalanx run: SIGTSTP (Ctrl-Z): a job on several hosts cannot be suspended, and continues"
                )
                return
            self.send_signal(signal.SIGSTOP, self.state.running, group=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if number in ENDING_SIGNALS:
            if not where and self.link.intercept_signal(number):
                return
            is_again, self._signalled_hosts = where in self._signalled_hosts, {*self._signalled_hosts, where}
            if self.state.phase == "stopping" and number == signal.SIGTERM == self.state.interrupted and not is_again:
                return  # a scheduler sends SIGTERM to every host: this is not a second request
            self.ranks.abandon_rest()
            if self.state.phase == "running":
                self.do_elastic([self.elastic.give_up()])  # replace no more ranks
            if self.state.phase == "killing":  # the third signal: do not wait for anything
                self.ranks.kill_zygote()
                return
        running = len(self.state.running)
        actions = self.state.on_signal(number, time.monotonic())
        if self.state.interrupted == number and running and self.state.started:
            name = signal.Signals(number).name + where
            if self.state.phase == "stopping":
                self.host.display.print(
                    f"phalanx run: {name}: stopping {count_ranks(running)}, with "
                    f"{self.state.shutdown_timeout_s:g} s to exit by themselves (again: kill at once)"
                )
            elif any(isinstance(action, Kill) for action in actions):
                self.host.display.print(f"phalanx run: {name} again: killing {count_ranks(running)}")
        self.do(actions)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                if not self.ranks.has_started:  # the zygote is still importing and cannot answer
                    self.host.zygote.kill()
                    self.link.sweep()
                else:
                    self._sweep()
            elif isinstance(action, ReportStragglers):
                self._report_stragglers(action.waited_s)
            else:
                if action.signum in ENDING_SIGNALS:
                    self.host.zygote.wake()
                self.send_signal(action.signum, action.ranks, group=action.group, is_relayed=action.is_relayed)

    def do_elastic(self, actions: list[ElasticAction]) -> None:
        now = time.monotonic()
        for action in actions:
            if isinstance(action, BeginGeneration):
                self._show_loss_reports(action)
                self.begin_generation(action)
            elif isinstance(action, SendToRank):
                self.state.is_saving = self.state.is_saving or action.message["kind"] == "end"
                self.send_to_rank(action.slot, action.message)
            elif isinstance(action, SendGeneration):
                self.send_generation(action.slot)
            elif isinstance(action, Evict):
                self.send_signal(signal.SIGKILL, (action.slot,), group=True)
            elif isinstance(action, Continue):
                self.send_signal(signal.SIGCONT, (action.slot,), group=True)
            elif isinstance(action, Abandon):
                if action.slot in self.ranks.processes.pids:
                    self.on_ended(action.slot, self.ranks.processes.pids[action.slot], -signal.SIGKILL, now)
            elif isinstance(action, Retire):
                for slot in action.slots:
                    self.state.on_retired(slot)
            elif isinstance(action, Print):
                self.host.display.print(action.text)
            elif isinstance(action, PrepareHost | DropHost):
                self.link.do(action)
            elif isinstance(action, GiveUp):
                for report in action.reports:
                    self.do(self.state.on_report(report, now))
                for exit in action.exits:
                    self.do(self.state.on_exit(exit))
                self.link.on_given_up()
        if self.numbers.has_old_stores:  # this loop may visit thousands of ranks
            generations = (each.generation for each in self.elastic.members.values())
            self.numbers.close_stores_before(min(generations, default=0))

    def _show_loss_reports(self, begun: BeginGeneration) -> None:
        """Print the first exception among the lost ranks; the line about each lost rank was already printed."""
        reports = [self._loss_reports.pop(lost.slot) for lost in begun.lost if lost.slot in self._loss_reports]
        if self.plan.settings.traceback:
            return  # the ranks print their tracebacks
        for report in reports:
            self.host.display.hide(report.rank)
        first = min(reports, key=lambda report: ("PeerLostError" in report.types, report.at), default=None)
        if first is not None and first.traceback:
            self.host.display.print((first.own_lines or first.traceback).rstrip())

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Begin a generation on this host: fork the missing processes, and send the others their ranks."""
        self.link.begin_generation(begun)
        part = self.numbers.begin(begun)
        if part is None:
            return
        for rank in part.forked:
            self.state.on_replaced(rank)
            try:
                self.ranks.fork(rank)
            except OSError as error:
                self.do_elastic(self.elastic.on_unforked(rank, limits.explain(error), time.monotonic()) or [])
                return
            self.host.zygote.continue_without(rank)
        for rank in part.slots:
            if rank not in part.forked:
                self.send_generation(rank)

    def send_generation(self, rank: int) -> None:
        """Send the current generation to an elastic rank of any host."""
        message = None if self.link.send_generation(rank) else self.numbers.plan_message(rank)
        if message is not None:
            self.send_to_rank(rank, message)

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message to an elastic rank of any host; delivery is not guaranteed."""
        if not self.link.send_to_rank(rank, message):
            self.links.send(rank, message)

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool, is_relayed: bool = False) -> None:
        """Send a signal to ranks of any host. If it `is_relayed`, ranks that receive it directly are skipped."""
        delay_s = decide_delay_s(signum, received_here=signum in self.host.received) if is_relayed else None
        self.ranks.send_signal(signum, ranks, group=group, delay_s=delay_s)
        if not is_relayed or signum in ENDING_SIGNALS:  # other relayed signals stay on the host that received them
            self.link.send_signal(signum, ranks, group=group, is_relayed=is_relayed)

    def _sweep(self) -> None:
        """Kill every process of the job; a second call does nothing."""
        if self.ranks.sweep():
            self.link.sweep()

    def _report_stragglers(self, waited_s: float) -> None:
        pids, state = self.ranks.processes.pids, self.state
        text = describe_stragglers(
            pids, state.running, state.world_size, waited_s, self.flights.logs(), self.place.ranks
        )
        if not self.state.overdue:
            text += "\n`phalanx stacks` shows their stacks; --exit-timeout SECONDS would stop them."
        self.host.display.print(text)

    def collect_logs(self) -> list[GroupLog]:
        """Return the flight records that have reached this host, of ranks on all hosts."""
        return self.link.merge_logs(self.flights.logs())

    @property
    def ended_ns(self) -> dict[int, int]:
        """Return the exit time of each process that has exited, by pid, in nanoseconds of CLOCK_MONOTONIC."""
        own = {end.pid: int(end.at * 1e9) for end in self.state.exits.values()}
        return {**self.ranks.processes.lost_ns, **own, **self.link.ended_ns}

    def close(self) -> None:
        """Close the link, and unmap the memory that the ranks have shared with this process."""
        self.link.close()
        self.flights.close()
        self.pages.close()


def count_ranks(ranks: int) -> str:
    """Return a number of ranks as text, such as `2 ranks`."""
    return f"{ranks} rank{'s' * (ranks != 1)}"


_MAX_PAGES = 4096  # bounds the pages of processes that are not or no longer ranks: nothing else drops these pages


class Pages:
    """`Pages` owns the descriptor of the newest progress page of each process."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # by process

    def add(self, pid: int, fds: Sequence[int]) -> None:
        """Take ownership of `fds`, which a process has sent; keep a single progress page, and close all others."""
        kept = fds[0] if len(fds) == 1 and read_page(fds[0]) is not None else -1
        for fd in fds:
            if fd != kept:
                os.close(fd)
        if kept == -1:
            return
        old = self._fds.pop(pid, None)
        if old is not None:
            os.close(old)
        self._fds[pid] = kept
        if len(self._fds) > _MAX_PAGES:
            os.close(self._fds.pop(next(iter(self._fds))))

    def fds_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the descriptors of the pages of `pids`, which this object still owns."""
        return {pid: self._fds[pid] for pid in pids if pid in self._fds}

    def read(self, pid: int) -> RankProgress | None:
        """Return the progress of the process; None if it shares no page."""
        fd = self._fds.get(pid)
        return None if fd is None else read_page(fd)

    def drop(self, pid: int) -> None:
        """Close the page of a process that has exited, because an elastic job may lose a thousand ranks."""
        fd = self._fds.pop(pid, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


MAX_OBSERVED = 64  # maximum number of groups whose memory the agent keeps mapped
_MAX_ENDED = 64  # maximum number of logs kept of groups whose memory is unmapped


class FlightRecorders:
    """`FlightRecorders` maps the recorders of at most `MAX_OBSERVED` groups, and keeps logs of `_MAX_ENDED` others."""

    def __init__(self) -> None:
        self._observed: list[Observer] = []
        self._ended: deque[GroupLog] = deque(maxlen=_MAX_ENDED)

    def add(self, message: Mapping[str, Any], fds: Sequence[int], lost: Collection[int] = ()) -> None:
        """Add the flight recorder of a group, which a rank has sent, and take ownership of `fds`.

        A recorder that cannot be read is dropped. `lost` has the pids of processes that have exited while the job
        continued; their groups have ended.
        """
        kept = -1
        try:
            group_info = GroupInfo(
                str(message["name"]),
                int(message["world_size"]),
                tuple(int(rank) for rank in message["ranks"]),
                tuple(int(pid) for pid in message["pids"]),
            )
            if len(group_info.ranks) == len(group_info.pids) and len(fds) == 1:
                observer = Observer(group_info, fds[0])
                kept = fds[0]
                self._close_ended(lost)
                self._observed.append(observer)
        except (ImportError, KeyError, TypeError, ValueError, OverflowError, OSError):
            pass  # the ranks have another version of Phalanx, or sent some other file: do not observe this group
        finally:
            for fd in fds:
                if fd != kept:
                    os.close(fd)

    @property
    def observed(self) -> tuple[Observer, ...]:
        """Return the observers of the groups whose memory is mapped, the oldest first."""
        return tuple(self._observed)

    def logs(self) -> list[GroupLog]:
        """Return the logs of all known groups, the oldest group first."""
        return [*self._ended, *(log for observer in self._observed if (log := _read(observer)) is not None)]

    def close(self) -> None:
        for observer in self._observed:
            observer.close()
        self._observed.clear()
        self._ended.clear()

    def _close_ended(self, lost: Collection[int]) -> None:
        """Unmap ended groups, and the oldest group if there is no room for one more; keep their logs."""
        kept = []
        for index, observer in enumerate(self._observed):
            has_lost = any(pid in lost for pid in observer.group_info.pids)
            if index > len(self._observed) - MAX_OBSERVED and not has_lost and not _is_over(observer):
                kept.append(observer)
                continue
            log = _read(observer)
            if log is not None:
                self._ended.append(log)
            observer.close()
        self._observed = kept


def _is_over(observer: Observer) -> bool:
    """Return whether the group has ended, or its memory cannot be read."""
    try:
        return observer.is_over()
    except (ValueError, OSError):
        return True


def _read(observer: Observer) -> GroupLog | None:
    """Return the group's log; None if a rank has overwritten the memory's header."""
    try:
        return observer.read()
    except (ValueError, OSError):
        return None
