"""Manage the processes of this host's ranks: the zygote forks them, reports their exits, and is replaced if lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from phalanx._base.loss_detection import SWEEP_S
from phalanx._base.processes import find_exit_status, kill_descendants, name_signal, read_stat
from phalanx._job.agent import error_files, limits
from phalanx._job.agent.adopted import AdoptedExit
from phalanx._job.agent.elastic import Elastic
from phalanx._job.agent.elastic_actions import ElasticAction
from phalanx._job.agent.environment import Place
from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.rank_numbers import RankNumbers
from phalanx._job.agent.scratch import create_scratch
from phalanx._job.agent.supervision import Supervision
from phalanx._job.agent.target import RankSetup
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.output.pump import Pump
from phalanx.errors import LaunchError

_MAX_REPORT_BYTES = 1 << 18
_MAX_REPORTS = 256
_FORKS_AHEAD = 8  # maximum number of forks requested but not yet reported; their descriptors are in transit
_MAX_FAILED_ZYGOTES = 3
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/dri")  # accelerators of NVIDIA, AMD and others


class ProcessListener(Protocol):
    """A `ProcessListener` is notified of the events of rank processes; `Attempt` implements it."""

    def on_own_start(self, rank: int, pid: int) -> None:
        """Process the start of a rank."""

    def on_ended(self, rank: int, pid: int, status: int, at: float) -> None:
        """Process the exit of a rank."""

    def on_own_report(self, report: ExceptionReport) -> None:
        """Process a failure report from a rank."""

    def do_elastic(self, actions: list[ElasticAction]) -> None:
        """Execute the actions of an elastic job."""


class HostRanks:
    """`HostRanks` manages the processes of the ranks of `place`; each is identified by the rank it was started with."""

    def __init__(
        self,
        plan: JobPlan,
        host: HostResources,
        place: Place,
        state: Supervision,
        elastic: Elastic,
        numbers: RankNumbers,
        listener: ProcessListener,
    ) -> None:
        """Create the object. `state` and `elastic` decide which ranks to fork and which losses the job survives."""
        self._plan = plan
        self._host = host
        self._place = place
        self._state = state
        self._elastic = elastic
        self._numbers = numbers
        self._listener = listener
        self.processes = RankProcesses()
        self.reports, self._rank_reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reported: set[int] = set()  # processes that have reported their failure
        self._early: list[ExceptionReport] = []  # reports of ranks whose start the zygote has not reported yet
        self._next = 0  # the number of ranks forked so far
        self._checks_exits = False
        self._num_failed_zygotes = 0  # how many zygotes in a row have died before a rank was requested
        self._zygote_is_new = False  # the current zygote is a replacement, and has not sent an event yet
        self._sweep_due: float | None = None
        self.is_swept = False
        self.has_started = False
        self.zygote_lost = False  # the zygote has exited and was not replaced
        self.zygote_killed = False  # this process has killed the zygote itself

    def exchange_deciders(self, state: Supervision, elastic: Elastic) -> None:
        """Use this `state` and `elastic` from now on."""
        self._state, self._elastic = state, elastic

    @property
    def sweep_due(self) -> float | None:
        """Return the deadline for the zygote to kill all processes; None if this was not requested, or is done."""
        return None if self.is_swept else self._sweep_due

    @property
    def awaits_start(self) -> bool:
        """Return whether the zygote may have forked a rank whose start it has not reported yet."""
        return any(rank not in self.processes.pids and self._state.is_running(rank) for rank in self._place.ranks)

    def rank_of(self, pid: int) -> int | None:
        """Return the rank of a process; None if the process is not a rank."""
        return next((rank for rank, known in self.processes.pids.items() if known == pid), None)

    def fork_some(self) -> None:
        """Fork the next ranks while the job runs, at most `_FORKS_AHEAD` ahead of the zygote."""
        while (
            self._state.phase == "running"
            and self._next < self._place.num_ranks
            and self._next - len(self.processes.pids) < _FORKS_AHEAD
        ):
            rank = self._place.first_rank + self._next
            try:
                self.fork(rank)
            except OSError as error:
                raise LaunchError(limits.explain_start(rank, self._place.world_size, error)) from error
            self._next += 1
        if self._state.phase != "running":
            self.abandon_rest()

    def abandon_rest(self) -> None:
        """Stop forking, and abandon the ranks that were not forked."""
        if self._zygote_is_new and self._elastic.forking:  # do not wait until the zygote has finished its imports
            for rank in self._elastic.forking:
                self._state.on_retired(rank)
            self._host.zygote.kill()
        for rank in self._place.ranks[self._next :]:
            self._state.on_abandoned(rank)
        self._next = self._place.num_ranks

    def fork(self, rank: int) -> None:
        """Fork the first process of `rank`, or its replacement.

        Raises:
            OSError: no file descriptors are left.
        """
        self._host.errors.remove(rank - self._place.first_rank)
        cpus = tuple(self._plan.pinning.cpus[rank - self._place.first_rank])
        setup = RankSetup(rank, self._numbers.plan_environment(rank), cpus)
        self.processes.fork(setup, self._rank_reports.fileno(), self._host.zygote, self._host.pump)

    def send_signal(self, signum: int, ranks: Iterable[int], *, group: bool, delay_s: float | None = None) -> None:
        """Send a signal to each rank of `ranks` that is on this host.

        `delay_s`: for a signal that the agent has received, how long the zygote waits before relaying it, in case
        every process of the job receives it anyway.
        """
        own = [rank for rank in ranks if rank in self._place.ranks]
        zygote = self._host.zygote
        if delay_s is None or self._zygote_is_new or zygote.control.gone:  # a new zygote may import for seconds
            zygote.signal(signum, own, group=group)
            self._host.adopted.signal(signum, own, group=group)
        else:
            zygote.relay(signum, own, group=group, delay_s=delay_s)

    def kill_zygote(self) -> None:
        """Kill the zygote, and with it the ranks; the agent kills their remaining children."""
        self._host.zygote.kill()
        self.zygote_killed = self.zygote_lost = True

    def sweep(self) -> bool:
        """Kill every process of the job on this host; return False if a sweep has already begun."""
        if self._sweep_due is not None:
            return False
        self._sweep_due = time.monotonic() + SWEEP_S
        zygote, adopted = self._host.zygote, self._host.adopted
        if adopted.used:
            self._report_exits(list(adopted.sweep(zygote.pid)))
        if zygote.has_forked and not zygote.control.gone:
            zygote.wake()
            zygote.sweep()
        else:  # it is still importing and has no children, or it has exited
            self.is_swept = True
        return True

    def _sweep_without_zygote(self) -> None:
        """Kill every process of the job here, because the zygote has not done so in time, and replace the zygote."""
        zygote = self._host.zygote
        reaped = kill_descendants([zygote.pid])
        zygote.close(reaped)
        for rank, pid in list(self.processes.pids.items()):
            if pid in reaped:
                self._listener.on_ended(rank, pid, os.waitstatus_to_exitcode(reaped[pid]), time.monotonic())
        self.is_swept = True
        try:
            self._host.zygote = zygote.start_another(self._host.adopted.sessions)
        except OSError as error:
            self.zygote_killed = self.zygote_lost = True
            self._host.display.print(f"phalanx run: the ranks cannot be started again: {limits.explain(error)}")

    def on_time(self, now: float) -> None:
        """Sweep if the zygote has not done so in time, and find exits that were not reported yet."""
        if self._checks_exits:
            self._find_exits()
        if self.sweep_due is not None and now > self.sweep_due:
            self._sweep_without_zygote()

    def read_reports(self) -> None:
        """Read at most `_MAX_REPORTS` reports, so that a flood of reports does not delay other events."""
        for _ in range(_MAX_REPORTS):
            try:
                data = self.reports.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # the socket is empty
                return
            report = ExceptionReport.from_bytes(data)
            if report is None:
                continue
            if report.rank in self.processes.pids:
                self._forward_report(report)
            elif report.rank in self._place.ranks and len(self._early) < _MAX_REPORTS:
                self._early.append(report)

    def _forward_report(self, report: ExceptionReport) -> None:
        # a child of the rank may have inherited the descriptor: accept reports only from ranks
        if self.processes.pids.get(report.rank) == report.pid:
            self._reported.add(report.pid)
            path = self._host.errors.find(report.rank - self._place.first_rank)
            self._listener.on_own_report(replace(report, error_file=path))

    def read_error_file(self, rank: int, pid: int, status: int, at: float) -> None:
        """Report the error file of a process that did not report its failure itself, such as a shell script."""
        path = self._host.errors.find(rank - self._place.first_rank)
        if status == 0 or not path or pid in self._reported:
            return
        report = error_files.read_report(path, rank, pid, at)
        if report is not None:
            self._listener.on_own_report(report)

    def receive_events(self, ready: set[int]) -> None:
        """Handle the zygote's events, and notice when it has exited."""
        control = self._host.zygote.control
        if control.fileno() not in ready:
            return
        control.send_some()
        for event in control.receive_available():
            self._on_event(event.content)
        if control.gone:
            self._replace_zygote()

    def _on_event(self, event: dict[str, Any]) -> None:
        self._zygote_is_new = False
        if event["event"] == "started":
            self.has_started = True
            self.processes.pids[event["rank"]] = event["pid"]
            self._listener.on_own_start(event["rank"], event["pid"])
            early, self._early = self._early, []
            for report in early:
                if report.rank == event["rank"]:
                    self._forward_report(report)
                else:
                    self._early.append(report)
        elif event["event"] == "unforked":
            error = OSError(event["errno"], os.strerror(event["errno"]))
            actions = self._elastic.on_unforked(event["rank"], limits.explain(error), time.monotonic())
            if actions is None:
                raise LaunchError(limits.explain_start(event["rank"], self._place.world_size, error))
            self._listener.do_elastic(actions)
        elif event["event"] == "exit":
            self._listener.on_ended(event["rank"], event["pid"], event["status"], event["at"])
        elif event["event"] == "swept":
            self.is_swept = True
        elif event["event"] == "relay":
            self._host.adopted.signal(event["signum"], event["ranks"], group=event["group"])

    def _replace_zygote(self) -> None:
        """Replace a zygote that has exited, if the ranks survive it; otherwise set `zygote_lost`, which ends the job.

        While the job is stopping and all ranks are adopted, do neither.
        """
        zygote, adopted = self._host.zygote, self._host.adopted
        ranks = {pid: rank for rank, pid in self.processes.pids.items() if self._state.is_running(rank)}
        # A lost rank counts as started even if its replacement is not decided yet.
        expected = {*self._state.started, *self._elastic.forking}
        unstarted = any(rank not in expected and self._state.is_running(rank) for rank in self._place.ranks)
        outlive = any(member.outlives for member in self._elastic.members.values())
        if self._state.phase != "running" and adopted.used and all(pid in adopted for pid in ranks):
            zygote.wait_exit()
            zygote.control.close()  # it has no ranks, and no more will be forked
            return
        if self._state.phase != "running" or unstarted or not outlive:
            self.zygote_lost = True
            return
        status = zygote.wait_exit()
        how = name_signal(-status) if status < 0 else f"exit code {status}"
        self._num_failed_zygotes = 0 if zygote.has_forked else self._num_failed_zygotes + 1
        who = f"the zygote (pid {zygote.pid}), which forks the ranks,"
        text = f"phalanx run: {who} exited: {how}. The ranks continue"
        adopted.adopt(zygote.pid, {pid: rank for pid, rank in ranks.items() if pid not in adopted})
        adopted.signal(
            signal.SIGKILL, [rank for pid, rank in ranks.items() if self._elastic.is_evicted(pid)], group=True
        )
        zygote.control.close()
        try:
            if self._num_failed_zygotes == _MAX_FAILED_ZYGOTES:
                raise OSError(f"{self._num_failed_zygotes} zygotes in a row have exited without forking a rank")
            self._host.zygote = zygote.start_another(adopted.sessions)
            self._zygote_is_new = True
        except OSError as error:
            self._host.display.print(f"{text}, but lost ranks cannot be replaced: {error.strerror or error}")
            self._listener.do_elastic(self._elastic.on_no_forks(time.monotonic()))
        else:
            self._host.display.print(f"{text}; starting another")
            for rank in self._elastic.forking:  # the old zygote has not reported these forks
                self.fork(rank)
                self._host.zygote.continue_without(rank)
        self._reap_adopted()

    def on_child_signal(self) -> None:
        """Handle SIGCHLD: an adopted rank has exited, or the zygote was stopped (its exit closes its socket)."""
        if self._host.adopted.used:
            self._reap_adopted()
        if self._host.zygote.was_stopped():
            self._host.display.print(
                f"phalanx run: the zygote (pid {self._host.zygote.pid}), which forks the ranks, was stopped. The ranks "
                "continue, but their exits are detected only after "
                f"kill -CONT {self._host.zygote.pid}"
            )

    def _reap_adopted(self) -> None:
        """Reap adopted ranks; the zygote is not notified of their exits."""
        sessions = self._host.adopted.sessions
        self._report_exits(list(self._host.adopted.reap(self._host.zygote.pid)))
        if sessions != self._host.adopted.sessions:
            self._host.zygote.guard(self._host.adopted.sessions)

    def _report_exits(self, ends: list[AdoptedExit]) -> None:
        for end in ends:
            self._listener.on_ended(end.rank, end.pid, end.status, end.at)

    def on_reported_loss(self) -> None:
        """React to a rank's report of a lost peer: check for exited processes in this turn of the loop."""
        self._host.zygote.wake()  # a stopped zygote would not report the exit
        self._checks_exits = not any(map(os.path.exists, _DEVICES))

    def _find_exits(self) -> None:
        """Process the exits of dying ranks before the kernel has freed their memory.

        A host with accelerators does not do this, since a replacement may need the memory of the same device.
        """
        self._checks_exits = False
        for rank, pid in list(self.processes.pids.items()):
            survives = self._state.phase == "running" and self._elastic.survives_loss_of(rank, pid)
            status = find_exit_status(read_stat(pid)) if survives else None
            if status is not None:
                self._listener.on_ended(rank, pid, os.waitstatus_to_exitcode(status), time.monotonic())

    def close(self) -> None:
        self.processes.close()
        self.reports.close()
        self._rank_reports.close()


_MAX_DUMP_BYTES = 1 << 16


class RankProcesses:
    """`RankProcesses` records the pid of each rank, and owns the files for its stacks and its faulthandler dump."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.stacks: dict[int, int] = {}  # by rank: the file for its stacks
        self.lost_ns: dict[int, int] = {}  # by pid: when processes exited whose loss the job survived
        self._dumps: dict[int, int] = {}

    def fork(self, setup: RankSetup, reports: int, zygote: ZygoteProcess, pump: Pump) -> None:
        """Fork the first process of a rank, or its replacement.

        Raises:
            OSError: no file descriptors are left.
        """
        rank = setup.rank
        for old in (self._dumps, self.stacks):
            if rank in old:
                os.close(old.pop(rank))
        dump = self._dumps[rank] = create_scratch("phalanx-dump")
        stacks = self.stacks[rank] = create_scratch("phalanx-stacks")
        ends = []
        try:
            for stream in (1, 2):
                ours, its = os.pipe()
                ends.append(its)
                pump.add(rank, stream, ours)
            zygote.fork(setup, [*ends, reports, dump, stacks])
        finally:
            for end in ends:
                os.close(end)

    def read_dump(self, rank: int) -> str:
        """Return faulthandler's dump of a fatal signal; empty if there was none."""
        return os.pread(self._dumps[rank], _MAX_DUMP_BYTES, 0).decode(errors="replace")

    def lose(self, exit: Exit) -> None:
        """Forget a process that has exited while the job continues."""
        self.pids.pop(exit.rank, None)
        self.lost_ns[exit.pid] = int(exit.at * 1e9)

    def close(self) -> None:
        for fd in (*self._dumps.values(), *self.stacks.values()):
            os.close(fd)
