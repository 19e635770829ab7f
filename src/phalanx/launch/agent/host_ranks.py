"""The ranks of this host: they are forked here, and what was decided about them is done."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from typing import Any

from phalanx.diagnostics.observer import GroupLog
from phalanx.errors import LaunchError
from phalanx.inspect.agent_socket import Request
from phalanx.inspect.stacks.job_snapshot import answer_others
from phalanx.launch import error_files, limits
from phalanx.launch.agent.adopted import AdoptedExit
from phalanx.launch.agent.elastic import Elastic
from phalanx.launch.agent.elastic_actions import (
    Abandon,
    BeginGeneration,
    Continue,
    ElasticAction,
    Evict,
    GiveUp,
    Retire,
    Say,
    SendToRank,
    TellGeneration,
    plan_message,
)
from phalanx.launch.agent.elastic_links import ElasticLinks
from phalanx.launch.agent.flights import Flights
from phalanx.launch.agent.host import Host
from phalanx.launch.agent.pages import Pages
from phalanx.launch.agent.rank_processes import RankProcesses
from phalanx.launch.agent.scratch import create_store
from phalanx.launch.agent.stragglers import describe_stragglers
from phalanx.launch.agent.supervision import Action, Kill, Supervision, Tell
from phalanx.launch.environment import JobEnvironment, Place, plan_rank_environment
from phalanx.launch.failure import Exit, Report
from phalanx.launch.generation import HostPart, HostSeats, Seating, plan_generation
from phalanx.launch.plan import JobPlan
from phalanx.processes import ENDING_SIGNALS

_MAX_REPORT_BYTES = 1 << 18
_MAX_REPORTS = 256
_SWEEP_LIMIT_S = 6.0  # a zygote that has not swept by then is killed: the agent sweeps
_FORKS_AHEAD = 8  # ranks that the zygote was told to fork and has not: their descriptors are on their way


class HostRanks:
    """The ranks of `place`, which are all on one host, and what is decided about them and the job.

    On several hosts there is one such object on each (`phalanx.launch.hosts`); what they do in another way are the
    methods without an underscore.
    """

    def __init__(
        self,
        plan: JobPlan,
        host: Host,
        restart_count: int,
        place: Place | None = None,
        first: BeginGeneration | None = None,
    ) -> None:
        """`place` has the numbers of the processes; `first` is the generation of an elastic job that they come to."""
        self._plan = plan
        self._host = host
        self._restart_count = restart_count
        self.place = place or Place.alone(plan.num_ranks)
        self._processes = RankProcesses()
        self._store: int | None = None
        self._old_stores: dict[int, int] = {}  # by generation: some ranks may still be about to open them
        self._reported: set[int] = set()  # processes that have told of their failure
        self._early: list[Report] = []  # of ranks that the zygote has forked and not told us of
        self._next = 0  # so many were forked
        self._sweep_due: float | None = None
        self._swept = False
        self.zygote_lost = False  # it has ended
        self.zygote_given_up = False  # because we killed it: it did not answer
        self._has_started = False
        self._zygote_is_new = False  # it takes the place of another one, and has forked nobody yet
        self._evicted: dict[int, str] = {}  # process -> why it was killed
        # `run` sets these
        self._job: JobEnvironment
        self._reports: socket.socket
        self._rank_reports: int  # the descriptor by which the ranks report
        self._begun = first  # the newest generation after that of the beginning
        self.generation = 0 if first is None else first.generation.number  # how often they have formed their group anew
        part = None if first is None else first.generation.part_of(self.member)
        self._part = part or self._first_part()
        self.links = ElasticLinks()
        self.elastic = self.decide_losses()
        self.state = self.supervise()
        self.flights = Flights()
        self.pages = Pages()

    def supervise(self) -> Supervision:
        """Who decides what becomes of the ranks."""
        return Supervision(self.place.world_size, self._plan.settings.grace_s, self._plan.settings.exit_timeout_s)

    def decide_losses(self) -> Elastic:
        """Who decides what becomes of the job when an elastic rank is lost."""
        elastic = Elastic(Seating.begin([self._own_seats()]), self._plan.settings.max_restarts)
        elastic.given_up = self.place.num_nodes > 1
        return elastic

    @property
    def member(self) -> int:
        """What this host is called in a generation."""
        return self.place.node

    def _own_seats(self) -> HostSeats:
        place = self.place
        return HostSeats(self.member, place.first_rank, place.num_ranks, frozenset(place.ranks))

    def _first_part(self) -> HostPart:
        (part,) = plan_generation(0, Seating.begin([self._own_seats()])).parts
        return HostPart(part.member, part.seats, (), self.place)

    @property
    def fds(self) -> tuple[int, ...]:
        """What else to wait on; when one is ready, `receive` is called."""
        return ()

    @property
    def due(self) -> float | None:
        """When to call `receive` although nothing has come."""
        return None

    def receive(self, ready: set[int]) -> None:
        """Handle the descriptors that are ready, in each turn."""

    def create_store(self) -> tuple[int | None, str]:
        """Where the ranks meet: a descriptor, ours, that leads there, and what PHALANX_STORE says."""
        store = create_store()
        return store, "" if store is None else f"/proc/{os.getpid()}/fd/{store}"

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool) -> None:
        """Have a signal sent to ranks, wherever they are."""
        self._host.zygote.signal(signum, [rank for rank in ranks if rank in self.place.ranks], group=group)
        self._host.adopted.signal(signum, ranks, group=group)

    def sweep_others(self) -> None:
        """Have every process of the job on other hosts killed."""

    @property
    def is_swept(self) -> bool:
        """Whether no process of the job is left, on any host."""
        return self._swept

    def ask_other_hosts(self, request: Request) -> None:
        """Somebody wants to know where the ranks of other hosts are."""
        answer_others(request.channel, [])
        request.close()

    def collect_logs(self) -> list[GroupLog]:
        """Return what the ranks have recorded."""
        return self.flights.logs()

    def name_host(self, rank: int) -> str:
        """Return the host of a rank, for people."""
        return socket.gethostname()

    @property
    def ended_ns(self) -> dict[int, int]:
        """When the ranks' processes ended, by process number, on CLOCK_MONOTONIC."""
        return {**self._processes.lost_ns, **{end.pid: int(end.at * 1e9) for end in self.state.exits.values()}}

    def close(self) -> None:
        """Let go of what the ranks have shown us."""
        self.flights.close()
        self.pages.close()

    def _fork_some(self) -> None:
        """Have the next ranks forked, as long as the zygote keeps up and the job is to go on."""
        while (
            self.state.phase == "running"
            and self._next < self.place.num_ranks
            and self._next - len(self._processes.pids) < _FORKS_AHEAD
        ):
            rank = self.place.first_rank + self._next
            try:
                self._fork(rank)
            except OSError as error:
                raise LaunchError(limits.explain_start(rank, self.place.world_size, error)) from error
            self._next += 1
        if self.state.phase != "running":
            self.abandon_rest()

    def abandon_rest(self) -> None:
        """End the job's forks: what was not forked is not going to be."""
        if self._zygote_is_new and self.elastic.awaited:  # nobody waits for its import any more
            for rank in self.elastic.awaited:
                self.state.on_retired(rank)
            self._host.zygote.kill()
        for rank in self.place.ranks[self._next :]:
            self.state.on_abandoned(rank)
        self._next = self.place.num_ranks

    def _fork(self, rank: int) -> None:
        """Have the process forked that is known by `rank`: the first one, or one that takes its place."""
        self._host.errors.renew(rank - self.place.first_rank)
        environment = self._plan_environment(rank)
        cpus = self._plan.placement.cpus[rank - self.place.first_rank]
        self._processes.fork(rank, environment, cpus, self._rank_reports, self._host.zygote, self._host.pump)

    def _plan_environment(self, rank: int) -> dict[str, str]:
        """Return the variables of the process that is known by `rank`, which is another rank in some generations.

        Its error file stays the same.
        """
        variables = plan_rank_environment(self._job, self._part.rank_of(rank))
        return {**variables, error_files.VARIABLE: self._host.errors.path_of(rank - self.place.first_rank)}

    def _give_up_zygote(self) -> None:
        """End it by force, and with it the ranks; what they leave behind the agent sweeps."""
        self._host.zygote.kill()
        self.zygote_given_up = self.zygote_lost = True

    def _sweep(self) -> None:
        """Have every process of the job killed, once."""
        if self._sweep_due is None:
            self._sweep_due = time.monotonic() + _SWEEP_LIMIT_S
            zygote, adopted = self._host.zygote, self._host.adopted
            if adopted.used:
                self._bury(list(adopted.sweep(zygote.pid)))
            if zygote.has_forked and not zygote.control.gone:
                zygote.wake()
                zygote.sweep()
            else:  # it is still importing: there is nothing below it
                self._swept = True
            self.sweep_others()

    def _bury(self, ends: list[AdoptedExit]) -> None:
        for end in ends:
            self._on_exit(end.rank, end.pid, end.status, end.at)

    def on_started(self, rank: int, pid: int) -> None:
        """Note that the process of a rank exists."""
        self.state.on_started(rank)
        self.elastic.on_started(rank, pid)

    def _on_exit(self, rank: int, pid: int, status: int, at: float) -> None:
        self._read_reports()  # what a rank told before its end counts before its end
        if self._processes.pids.get(rank) != pid:
            return  # it was told before
        for _, _, message in self.links.drop(pid):
            self.on_rank_message(rank, pid, message)
        self._read_error_file(rank, pid, status, at)
        dump = self._processes.read_dump(rank)
        self.on_exit(Exit(rank, pid, status, at, self._evicted.pop(pid, dump)))
        self.pages.drop(pid)

    def _read_error_file(self, rank: int, pid: int, status: int, at: float) -> None:
        """Read the word that a process may have left that could not tell us of its failure, below a shell
        script say.
        """
        path = self._host.errors.find(rank - self.place.first_rank)
        if status == 0 or not path or pid in self._reported:
            return
        report = error_files.read_report(path, rank, pid, at)
        if report is not None:
            self.on_report(report)

    def hear_ranks(self) -> None:
        """All that elastic ranks of this host have said until now."""
        for fd in self.links.fds:
            for rank, pid, message in self.links.read(fd):
                self.on_rank_message(rank, pid, message)

    def on_exit(self, exit: Exit) -> None:
        """Hear that the process of a rank has ended; all that it said was heard."""
        self.hear_ranks()  # first, or the last who is known to hold the state ends before others have said that they do
        for pid in self._processes.pids.values():
            progress = self.pages.read(pid)
            if progress is not None and progress.state is not None:
                self.elastic.on_step(progress.state.steps)
        actions = self.elastic.on_exit(exit, time.monotonic()) if self.state.phase == "running" else None
        if actions is None:
            if self.elastic.has_trained:  # what the others do now is theirs alone, saving perhaps
                self.state.settle_s = self.state.grace_s
            self.do(self.state.on_exit(exit))
            return
        self._processes.lose(exit)
        self.state.on_lost(exit.rank)
        self.do_elastic(actions)

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Hear what an elastic rank of this host says."""
        if message.get("kind") == "lost":
            self._host.zygote.wake()  # somebody's end is not told while the zygote is stopped
        self.do_elastic(self.elastic.on_message(rank, pid, message, time.monotonic()))

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> None:
        """Tell an elastic rank something; it hears it if it listens."""
        self.links.send(rank, message)

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Do this host's part: fork the processes that are missing here, tell the others which ranks they are."""
        self._begun = begun
        self.generation = begun.generation.number
        part = begun.generation.part_of(self._part.member)
        if part is None:
            return
        self._part = part
        if self._store is not None:
            self._old_stores[begun.generation.number - 1] = self._store
        self._store, path = self.create_store()
        self._job = self._describe_job(path)
        for rank in part.forked:
            self.state.on_replaced(rank)
            try:
                self._fork(rank)
            except OSError as error:
                self.do_elastic(self.elastic.on_unforked(rank, limits.explain(error), time.monotonic()) or [])
                return
            self._host.zygote.let_go_of_lost(rank)
        for rank in part.seats:
            if rank not in part.forked:
                self.tell_generation(rank)

    def _describe_job(self, store: str) -> JobEnvironment:
        job = self._plan.describe_job(self._part.place, self._restart_count, store, self._host.agent_socket.address)
        return replace(job, generation=self.generation)

    def tell_generation(self, rank: int) -> None:
        """Tell an elastic rank which one it is in the generation that there is."""
        if self._begun is not None and rank in self._part.seats:
            environment = self._plan_environment(rank)
            self.send_to_rank(rank, plan_message(self._begun.generation, rank, self._begun, environment))

    def _close_old_stores(self) -> None:
        """Those that no rank is going to open any more."""
        reached = min((member.generation for member in self.elastic.members.values()), default=0)
        for number in [number for number in self._old_stores if number < reached]:
            os.close(self._old_stores.pop(number))

    def do_elastic(self, actions: list[ElasticAction]) -> None:
        """Do what was decided for an elastic job."""
        now = time.monotonic()
        for action in actions:
            if isinstance(action, BeginGeneration):
                self.begin_generation(action)
            elif isinstance(action, SendToRank):
                self.state.told_to_end = self.state.told_to_end or action.message["kind"] == "end"
                self.send_to_rank(action.seat, action.message)
            elif isinstance(action, TellGeneration):
                self.tell_generation(action.seat)
            elif isinstance(action, Evict):
                self.send_signal(signal.SIGKILL, (action.seat,), group=True)
            elif isinstance(action, Continue):
                self.send_signal(signal.SIGCONT, (action.seat,), group=True)
            elif isinstance(action, Abandon):
                if action.seat in self._processes.pids:
                    self._on_exit(action.seat, self._processes.pids[action.seat], -signal.SIGKILL, now)
            elif isinstance(action, Retire):
                for seat in action.seats:
                    self.state.on_retired(seat)
            elif isinstance(action, Say):
                self._host.display.say(action.text)
            elif isinstance(action, GiveUp):
                for report in action.reports:
                    self.do(self.state.on_report(report, now))
                for exit in action.exits:
                    self.do(self.state.on_exit(exit))
        self._close_old_stores()

    def _read_reports(self) -> None:
        """Read what has come; no more than a while of it, because whoever floods us must not keep us from the rest."""
        for _ in range(_MAX_REPORTS):
            try:
                data = self._reports.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # there is no more
                return
            report = Report.from_bytes(data)
            if report is None:
                continue
            if report.rank in self._processes.pids:
                self._take_report(report)
            elif report.rank in self.place.ranks and len(self._early) < _MAX_REPORTS:
                self._early.append(report)

    def _take_report(self, report: Report) -> None:
        # the script may have passed the descriptor on, to a child or as a file of its own: only ranks are heard
        if self._processes.pids.get(report.rank) == report.pid:
            self._reported.add(report.pid)
            path = self._host.errors.find(report.rank - self.place.first_rank)
            self.on_report(replace(report, error_file=path))

    def on_report(self, report: Report) -> None:
        """Take what a rank has told of its failure: it is a loss of an elastic job, or the failure of another."""
        actions = self.elastic.on_report(report, time.monotonic()) if self.state.phase == "running" else None
        if actions is not None:
            self.do_elastic(actions)
            return
        if report.traceback and self.state.phase in ("running", "settling"):
            self._host.display.expect(report.rank, report.traceback)
        self.do(self.state.on_report(report, time.monotonic()))

    def do(self, actions: list[Action]) -> None:
        """Do what was decided."""
        for action in actions:
            if isinstance(action, Kill):
                if not self._has_started:  # the zygote is still importing and can't hear us
                    self._host.zygote.kill()
                    self.sweep_others()
                else:
                    self._sweep()
            elif isinstance(action, Tell):
                self._report_stragglers(action.waited_s)
            else:
                if action.signum in ENDING_SIGNALS:
                    self._host.zygote.wake()
                self.send_signal(action.signum, action.ranks, group=action.group)

    def _report_stragglers(self, waited_s: float) -> None:
        text = describe_stragglers(
            self._processes.pids,
            self.state.running,
            self.place.world_size,
            waited_s,
            self.flights.logs(),
            self.place.ranks,
        )
        if not self.state.overdue:
            text += "\n`phalanx stacks` shows where they are; --exit-timeout SECONDS would stop them."
        self._host.display.say(text)


def count_ranks(ranks: int) -> str:
    """How people say it."""
    return f"{ranks} rank{'s' * (ranks != 1)}"
