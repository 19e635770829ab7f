"""One attempt at a job: the event loop. What happens goes to `Supervision`; what that answers is done here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.diagnostics.observer import GroupLog
from phalanx.diagnostics.progress_page import KIND as PROGRESS_PAGE
from phalanx.errors import LaunchError
from phalanx.launch import limits
from phalanx.launch.agent.adopted import Adopted, AdoptedExit
from phalanx.launch.agent.agent_socket import AgentSocket, Request
from phalanx.launch.agent.elastic import (
    Abandon,
    BeginGeneration,
    Continue,
    Elastic,
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
from phalanx.launch.agent.pages import Pages
from phalanx.launch.agent.scratch import create_scratch, create_store
from phalanx.launch.agent.signals import read_signals
from phalanx.launch.agent.stragglers import describe_stragglers
from phalanx.launch.agent.supervision import Action, Kill, Supervision, Tell
from phalanx.launch.agent.watch import Accused, Watch, describe_slow, describe_wait, read_stack
from phalanx.launch.agent.zygote_process import ZygoteProcess
from phalanx.launch.environment import Job, Place, plan_rank_environment
from phalanx.launch.failure import Exit, Report, summarise
from phalanx.launch.generation import HostPart, HostSeats, Seating, plan_generation
from phalanx.launch.output.display import Display
from phalanx.launch.output.logs import Logs
from phalanx.launch.output.pump import Pump
from phalanx.launch.plan import JobPlan
from phalanx.launch.processes import ENDING_SIGNALS, STACKS_SIGNAL, name_signal
from phalanx.launch.stacks.job_snapshot import JobSnapshot, answer, answer_others
from phalanx.symmetric_memory.peer import peer_of

_MAX_REPORT_BYTES = 1 << 18
_MAX_REPORTS = 256
_MAX_DUMP_BYTES = 1 << 16
_SWEEP_LIMIT_S = 6.0  # a zygote that has not swept by then is killed: the agent sweeps
_FORKS_AHEAD = 8  # ranks that the zygote was told to fork and has not: their descriptors are on their way
_READ_S = 0.05  # a flood of output makes way for signals and events this often
_REPORT_END_AFTER_S = 1.0
_LONGEST_WAIT_S = 3600.0  # poll takes milliseconds, in an int
_MAX_STILLBORN = 3
_MAX_KNOCKING = 256  # ranks whose connection comes before the zygote's word that they exist


@dataclass
class Host:
    """What outlives an attempt: the zygote, the way out for lines, where signals arrive, where requests come."""

    zygote: ZygoteProcess
    pump: Pump
    display: Display
    logs: Logs
    signals: int
    agent_socket: AgentSocket
    adopted: Adopted = field(default_factory=Adopted)


class Attempt:
    """Forks the ranks of `place`, which are all on one host, and sees them to their end.

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
        self._pids: dict[int, int] = {}
        self._dumps: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        self._store: int | None = None
        self._early: list[Report] = []  # of ranks that the zygote has forked and not told us of
        self._next = 0  # so many were forked
        self._sweep_due: float | None = None
        self._report_end_at: float | None = None
        self._swept = False
        self.zygote_lost = False  # it has ended
        self.zygote_given_up = False  # because we killed it: it did not answer
        self._ended_ns: dict[int, int] = {}  # of processes that were lost, and the job has gone on
        self._begun = first  # the newest generation after that of the beginning
        part = None if first is None else first.generation.part_of(self.member)
        self._part = part or self._first_part()
        self._old_stores: dict[int, int] = {}  # by generation: some ranks may still be about to open them
        self._knocking: list[Request] = []
        self._has_started = False
        self._zygote_is_new = False  # it takes the place of another one, and has forked nobody yet
        self._stillborn = 0  # zygotes in a row that have died before they were asked for anybody
        self._watch = Watch(plan.settings.evict_after_s, time.monotonic())
        self._evicted: dict[int, str] = {}  # process -> why it was killed
        self.links = ElasticLinks()
        self.elastic = self.decide_losses()
        self.state = self.supervise()
        self.flights = Flights()
        self.pages = Pages()
        self.generation = (
            0 if first is None else first.generation.number
        )  # how often the ranks have formed their group anew
        self._started_ns = time.monotonic_ns()

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
        """Called in each turn, with the descriptors that are ready."""

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
        answer_others(request.sock, [])
        request.close()

    def collect_logs(self) -> list[GroupLog]:
        """What the ranks have recorded."""
        return self.flights.logs()

    def name_host(self, rank: int) -> str:
        """The host of a rank, for people."""
        return socket.gethostname()

    def run(self) -> None:
        """Returns when every rank has ended, every process below the zygote is gone and every line was queued.

        What is in `flights` stays until `close`.
        """
        if self._restart_count or self.place.num_nodes > 1:
            self._host.logs.begin(self.place.ranks, self._restart_count)
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        store, path = self.create_store()
        self._store = store
        self._job = self._describe_job(path)
        try:
            with reports, theirs:
                self._reports = reports
                self._rank_reports = theirs.fileno()
                self._fork_some()
                self._loop(lambda: self.state.finished)
                self._sweep()
                self._loop(lambda: self.is_swept)
                if not self.zygote_lost:
                    self._host.pump.drain()
                self._host.display.release(self.first)
        finally:
            for request in self._knocking:
                request.close()
            self.links.close()
            stores = [*self._old_stores.values(), *([self._store] if self._store is not None else [])]
            for fd in (*self._dumps.values(), *self._stacks.values(), *stores):
                os.close(fd)

    @property
    def ended_ns(self) -> dict[int, int]:
        """When the ranks' processes ended, by process number, on CLOCK_MONOTONIC."""
        return {**self._ended_ns, **{end.pid: int(end.at * 1e9) for end in self.state.exits.values()}}

    def close(self) -> None:
        """Let go of what the ranks have shown us."""
        self.flights.close()
        self.pages.close()

    def _fork_some(self) -> None:
        """Have the next ranks forked, as long as the zygote keeps up and the job is to go on."""
        while (
            self.state.phase == "running"
            and self._next < self.place.num_ranks
            and self._next - len(self._pids) < _FORKS_AHEAD
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
        """The job is to end: what was not forked is not going to be."""
        if self._zygote_is_new and self.elastic.awaited:  # nobody waits for its import any more
            for rank in self.elastic.awaited:
                self.state.on_retired(rank)
            self._host.zygote.kill()
        for rank in self.place.ranks[self._next :]:
            self.state.on_abandoned(rank)
        self._next = self.place.num_ranks

    def _fork(self, rank: int) -> None:
        """Have the process forked that is known by `rank`: the first one, or one that takes its place."""
        for old in (self._dumps, self._stacks):
            if rank in old:
                os.close(old.pop(rank))
        dump = self._dumps[rank] = create_scratch("phalanx-dump")
        stacks = self._stacks[rank] = create_scratch("phalanx-stacks")
        ends = []
        try:
            for stream in (1, 2):
                ours, its = os.pipe()
                ends.append(its)
                self._host.pump.add(rank, stream, ours)
            environment = plan_rank_environment(self._job, self._part.rank_of(rank))
            cpus = self._plan.placement.cpus[rank - self.place.first_rank]
            self._host.zygote.fork(rank, environment, cpus, [*ends, self._rank_reports, dump, stacks])
        finally:
            for end in ends:
                os.close(end)

    def _loop(self, done: Callable[[], bool]) -> None:
        host = self._host
        while not done() and not self.zygote_lost:
            poll = select.poll()
            sockets = (*host.agent_socket.fds, *self.links.fds)
            for fd in (host.signals, self._reports.fileno(), *host.pump.pipes, *sockets, *self.fds):
                poll.register(fd, select.POLLIN)
            for fd in self.links.waiting:
                poll.register(fd, select.POLLIN | select.POLLOUT)
            control = host.zygote.control
            if not control.gone:
                poll.register(control.fileno(), select.POLLIN | (select.POLLOUT if control.waiting else 0))
            for writer in host.display.writers:
                poll.register(writer.fd, select.POLLOUT)
            times = [
                at
                for at in (
                    self.state.next_due, host.display.next_due, self._sweep_due, self._report_end_at, self.due,
                    self.elastic.next_due, self._watch.next_due if self.state.phase == "running" else None,
                )
                if at is not None
            ]  # fmt: skip
            left_s = min([_LONGEST_WAIT_S, *(max(0.0, at - time.monotonic()) for at in times)])
            ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1)}
            if host.signals in ready:
                for number in read_signals(host.signals):
                    self.on_signal(number)
            self._read_output(ready)
            self.receive(ready)
            for fd in host.agent_socket.fds:
                if fd in ready:
                    self._receive(fd)
            self._hear_ranks(ready)
            if self._reports.fileno() in ready:
                self._read_reports()
            if control.fileno() in ready:
                control.send_some()
                for event in control.take():
                    self._on_event(event)
                if control.gone:
                    self._lose_zygote()
            if host.display.reader_gone and self.state.interrupted is None:
                self.abandon_rest()
                host.display.say(
                    "phalanx run: nobody reads its output any more (stdout was closed): stopping "
                    f"{_count(len(self.state.running))}"
                )
                self.do(self.state.on_signal(signal.SIGPIPE, time.monotonic()))
            self._on_time()
            self._fork_some()
            host.display.tick()

    def _read_output(self, ready: set[int]) -> None:
        """Read the pipes that are ready, for a while; those that were not reached come first the next time."""
        end = time.monotonic() + _READ_S
        for fd in self._host.pump.pipes:
            if fd in ready:
                self._host.pump.read(fd, self._read_reports)  # a rank reports its failure before it prints it
                if time.monotonic() > end:
                    return

    def _on_time(self) -> None:
        now = time.monotonic()
        self.do(self.state.on_time(now))
        self.do_elastic(self.elastic.on_time(now))
        if self.state.phase == "running" and now >= self._watch.next_due:
            self._look(now)
        if self.state.phase not in ("running", "settling"):
            self._host.display.release(self.first)
            if self._report_end_at is None and self.state.interrupted is None:
                self._report_end_at = now + _REPORT_END_AFTER_S
        if self._report_end_at is not None and now >= self._report_end_at:
            self._report_end_at = float("inf")
            self._report_end()
        if self._sweep_due is not None and now > self._sweep_due and not self._swept:
            self._give_up_zygote()

    def _report_end(self) -> None:
        """The others take their time to end: whoever looks on does not wait for them to hear what has happened."""
        failures, running = self.state.failures, len(self.state.running)
        if failures and running and self.state.interrupted is None and not self.state.overdue:
            self._host.display.say(
                f"phalanx run: rank {failures[0].rank} has failed: {summarise(failures[0])}. More when all have ended: "
                f"{_count(running)} may still take up to {self.state.grace_s:g} s"
            )

    @property
    def first(self) -> int | None:
        """The rank whose traceback will be told at the end; None if none will be."""
        failures = [] if self.state.interrupted is not None or self.state.overdue else self.state.failures
        return failures[0].rank if failures and failures[0].report is not None else None

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

    def _lose_zygote(self) -> None:
        """The zygote has ended. Where the ranks outlive it, another one is started; else the job ends."""
        zygote, adopted = self._host.zygote, self._host.adopted
        ranks = {pid: rank for rank, pid in self._pids.items() if rank in self.state.running}
        expected = {*ranks.values(), *self.elastic.awaited}
        unstarted = any(rank in self.place.ranks and rank not in expected for rank in self.state.running)
        outlive = any(member.outlives for member in self.elastic.members.values())
        if self.state.phase != "running" and adopted.used and all(pid in adopted for pid in ranks):
            zygote.wait_exit()
            zygote.control.close()  # it had nobody below it, and nobody is to be forked any more
            return
        if self.state.phase != "running" or unstarted or not outlive:
            self.zygote_lost = True
            return
        status = zygote.wait_exit()
        how = name_signal(-status) if status < 0 else f"exit code {status}"
        self._stillborn = 0 if zygote.has_forked else self._stillborn + 1
        who = f"the zygote (pid {zygote.pid}), from which the ranks are forked,"
        said = f"phalanx run: {who} ended: {how}. The ranks go on"
        adopted.adopt(zygote.pid, {pid: rank for pid, rank in ranks.items() if pid not in adopted})
        zygote.control.close()
        try:
            if self._stillborn == _MAX_STILLBORN:
                raise OSError(f"{self._stillborn} in a row have ended like this")
            self._host.zygote = zygote.start_another(adopted.sessions)
            self._zygote_is_new = True
        except OSError as error:
            self._host.display.say(f"{said}, but none of them can be replaced: {error.strerror or error}")
            self.do_elastic(self.elastic.on_no_forks(time.monotonic()))
        else:
            self._host.display.say(f"{said}; another one is started")
            for rank in self.elastic.awaited:  # whom the old one was told to fork, and did not tell of
                self._fork(rank)
                self._host.zygote.let_go_of_lost(rank)
        self._reap_adopted()

    def _reap_adopted(self) -> None:
        """The ends of ranks whose zygote has gone: nobody else tells of them."""
        sessions = self._host.adopted.sessions
        self._bury(list(self._host.adopted.reap(self._host.zygote.pid)))
        if sessions != self._host.adopted.sessions:
            self._host.zygote.guard(self._host.adopted.sessions)

    def _bury(self, ends: list[AdoptedExit]) -> None:
        for end in ends:
            self._on_exit(end.rank, end.pid, end.status, end.at)

    def _on_event(self, event: dict[str, Any]) -> None:
        self._zygote_is_new = False
        if event["event"] == "started":
            self._has_started = True
            self._pids[event["rank"]] = event["pid"]
            self.on_started(event["rank"], event["pid"])
            self._admit_early()
            early, self._early = self._early, []
            for report in early:
                if report.rank == event["rank"]:
                    self._take_report(report)
                else:
                    self._early.append(report)
        elif event["event"] == "unforked":
            error = OSError(event["errno"], os.strerror(event["errno"]))
            actions = self.elastic.on_unforked(event["rank"], limits.explain(error), time.monotonic())
            if actions is None:
                raise LaunchError(limits.explain_start(event["rank"], self.place.world_size, error))
            self.do_elastic(actions)
        elif event["event"] == "exit":
            self._on_exit(event["rank"], event["pid"], event["status"], event["at"])
        elif event["event"] == "swept":
            self._swept = True

    def _on_exit(self, rank: int, pid: int, status: int, at: float) -> None:
        self._read_reports()  # what a rank told before its end counts before its end
        if self._pids.get(rank) != pid:
            return  # it was told before
        for _, _, message in self.links.drop(pid):
            self.on_rank_message(rank, pid, message)
        dump = os.pread(self._dumps[rank], _MAX_DUMP_BYTES, 0).decode(errors="replace")
        dump = self._evicted.pop(pid, dump)
        self.on_exit(Exit(rank, pid, status, at, dump))
        self.pages.drop(pid)

    def on_started(self, rank: int, pid: int) -> None:
        """The process of a rank exists."""
        self.state.on_started(rank)
        self.elastic.on_started(rank, pid)

    def _look(self, now: float) -> None:
        """Whom do the others wait for? Costs some milliseconds of this process, every few seconds."""
        watch = self._watch
        pids = {rank: self._pids[rank] for rank in self.state.running if rank in self._pids}
        groups, steps_ns = self.flights.logs(), {pid: at for pid in pids.values() if (at := self._last_step_ns(pid))}
        if watch.is_due(now):
            for accused in watch.look(pids, groups, steps_ns, self._stacks, now):
                self.send_signal(STACKS_SIGNAL, (accused.rank,), group=False)
            slow = watch.find_slow(now)
            rank = next((rank for rank, pid in pids.items() if slow is not None and pid == slow.pid), None)
            if slow is not None and rank is not None:
                self._host.display.say(describe_slow(slow, rank))
        for accused in watch.judge(pids, groups, steps_ns, now):
            if self._pids.get(accused.rank) == accused.pid:
                self._sentence(accused, groups)

    def _last_step_ns(self, pid: int) -> int:
        """When the process has last completed a step; 0 if it does not say."""
        progress = self.pages.read(pid)
        tracks = (progress.loop, progress.state) if progress is not None else ()
        return max((track.recent[-1][0] for track in tracks if track is not None), default=0)

    def _sentence(self, accused: Accused, groups: Sequence[GroupLog]) -> None:
        """Tell of a rank that keeps the others waiting; kill it if that was asked for."""
        rank_of = {pid: rank for rank, pid in self._pids.items()}
        text = describe_wait(accused, rank_of, groups)
        stack = read_stack(self._stacks[accused.rank], accused.offset)
        told = f"phalanx run: {text}" + (f"\n{textwrap.indent(stack.rstrip(), '  ')}" if stack else "")
        if not accused.evict:
            self._host.display.say(f"{told}\n--evict-after SECONDS would kill it.")
            return
        why = f"the others waited for it for {accused.silent.silent_s:.1f} s"
        if not accused.silent.waiting:
            why = f"it had done nothing for {accused.silent.silent_s:.1f} s"
        why += f" (--evict-after {self._plan.settings.evict_after_s:g})"
        if self.elastic.claims(accused.rank, accused.pid):
            self._host.display.say(told)
            self.do_elastic(self.elastic.evict(accused.rank, why, time.monotonic()))
        else:
            self._evicted[accused.pid] = f"It was killed: {text} (--evict-after).\n\n{stack}".rstrip()
            self.send_signal(signal.SIGKILL, (accused.rank,), group=True)

    def on_exit(self, exit: Exit) -> None:
        """The process of a rank has ended; all that it said was heard."""
        for pid in self._pids.values():
            progress = self.pages.read(pid)
            if progress is not None and progress.state is not None:
                self.elastic.on_step(progress.state.steps)
        actions = self.elastic.on_exit(exit, time.monotonic()) if self.state.phase == "running" else None
        if actions is None:
            if self.elastic.has_trained:  # what the others do now is theirs alone, saving perhaps
                self.state.settle_s = self.state.grace_s
            self.do(self.state.on_exit(exit))
            return
        self._pids.pop(exit.rank, None)
        self._ended_ns[exit.pid] = int(exit.at * 1e9)
        self.state.on_lost(exit.rank)
        self.do_elastic(actions)

    def _hear_ranks(self, ready: set[int]) -> None:
        for fd in self.links.waiting:
            if fd in ready:
                self.links.send_waiting(fd)
        for fd in self.links.fds:
            if fd in ready:
                for rank, pid, message in self.links.read(fd):
                    self.on_rank_message(rank, pid, message)

    def _admit(self, request: Request) -> None:
        """A rank opens the connection by which it tells that it survives the loss of others."""
        pid = request.message.get("pid")
        rank = next((rank for rank, known in self._pids.items() if known == pid), None)
        if rank is None or not isinstance(pid, int):
            self._knocking.append(request)  # the zygote's word may be on its way
            if len(self._knocking) > _MAX_KNOCKING:
                self._knocking.pop(0).close()
            return
        for fd in request.fds:
            os.close(fd)
        self._host.zygote.let_go_of_lost(rank)
        self._host.zygote.warm_up()
        self.links.admit(request.sock, rank, pid, {"kind": "welcome", "generation": self.generation})
        self.on_rank_message(rank, pid, request.message)

    def _admit_early(self) -> None:
        knocking, self._knocking = self._knocking, []
        for request in knocking:
            self._admit(request)

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """An elastic rank of this host says something."""
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

    def _describe_job(self, store: str) -> Job:
        job = self._plan.describe_job(self._part.place, self._restart_count, store, self._host.agent_socket.address)
        return replace(job, generation=self.generation)

    def tell_generation(self, rank: int) -> None:
        """Tell an elastic rank which one it is in the generation that there is."""
        if self._begun is not None and rank in self._part.seats:
            environment = plan_rank_environment(self._job, self._part.rank_of(rank))
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
                if action.seat in self._pids:
                    self._on_exit(action.seat, self._pids[action.seat], -signal.SIGKILL, now)
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

    def _receive(self, fd: int) -> None:
        """A request: of a rank that shows us its memory, or somebody who wants to know where the ranks are."""
        request = self._host.agent_socket.read(fd)
        if request is None:
            return
        has_token = request.message.get("token") == self._host.agent_socket.token
        if request.message.get("kind") == "group" and has_token:
            request.sock.close()
            self.flights.add(request.message, request.fds)
            return
        if request.message.get("kind") == PROGRESS_PAGE and has_token:
            self.pages.add(peer_of(request.sock).pid, request.fds)
            request.sock.close()
            return
        if request.message.get("kind") == "elastic" and has_token:
            self._admit(request)
            return
        if request.message.get("kind") == "store" and has_token and self._store is not None:
            with contextlib.suppress(OSError):  # it did not wait
                socket.send_fds(request.sock, [b"store"], [self._store])
        if request.message.get("kind") == "stacks of other hosts":
            self.ask_other_hosts(request)
            return
        if request.message.get("kind") == "snapshot":
            self._answer_snapshot(request)
        request.close()

    def _answer_snapshot(self, request: Request) -> None:
        """Who the ranks are, and copies of what they write."""
        living = [rank for rank in self.state.running if rank in self._pids]
        observed = self.flights.observed
        pages = self.pages.fds_of([self._pids[rank] for rank in living])
        with_stacks = bool(request.message.get("stacks", True))
        snapshot = JobSnapshot(
            os.getpid(),
            self._plan.settings.target.name,
            self.place.world_size,
            self._host.zygote.pid,
            tuple((rank, self._pids[rank]) for rank in living),
            tuple(observer.group_info for observer in observed),
            self.place.node,
            self.place.num_nodes,
            tuple(pages),
            with_stacks,
            tuple((rank, end.status) for rank, end in sorted(self.state.exits.items())),
            self._restart_count,
            self._plan.settings.max_restarts or 0,
            self.generation,
            self._started_ns,
            tuple((lost.rank, lost.pid, int(lost.at * 1e9), lost.why) for lost in self.elastic.losses),
        )
        stacks = [self._stacks[rank] for rank in living] if with_stacks else []
        answer(request.sock, snapshot, stacks, [observer.control for observer in observed], list(pages.values()))

    def _read_reports(self) -> None:
        """What has come; no more than a while of it, because whoever floods us must not keep us from the rest."""
        for _ in range(_MAX_REPORTS):
            try:
                data = self._reports.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # there is no more
                return
            report = Report.from_bytes(data)
            if report is None:
                continue
            if report.rank in self._pids:
                self._take_report(report)
            elif report.rank in self.place.ranks and len(self._early) < _MAX_REPORTS:
                self._early.append(report)

    def _take_report(self, report: Report) -> None:
        # the script may have passed the descriptor on, to a child or as a file of its own: only ranks are heard
        if self._pids.get(report.rank) == report.pid:
            if self.state.phase == "running":
                actions = self.elastic.on_report(report, time.monotonic())
                if actions is not None:
                    self.do_elastic(actions)
                    return
            if report.traceback and self.state.phase in ("running", "settling"):
                self._host.display.expect(report.rank, report.traceback)
            self.do(self.state.on_report(report, time.monotonic()))

    def on_signal(self, number: int, where: str = "") -> None:
        """A signal has come, here or at the agent of another host (`where`)."""
        if number == signal.SIGCHLD:  # the zygote's end shows on its socket
            if self._host.adopted.used:
                self._reap_adopted()
            if self._host.zygote.was_stopped():
                self._host.display.say(
                    f"phalanx run: somebody has stopped the zygote (pid {self._host.zygote.pid}), from which the ranks "
                    "are forked. The ranks go on, but their ends are not seen until it does: "
                    f"kill -CONT {self._host.zygote.pid}"
                )
            return
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks stop with us, and go on with us
            if self.place.num_nodes > 1:  # the other hosts would hear nothing of this one, and count it as lost
                self._host.display.say(
                    "phalanx run: SIGTSTP (Ctrl-Z): a job on several hosts cannot be suspended; it goes on"
                )
                return
            self.send_signal(signal.SIGSTOP, self.state.running, group=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if number in ENDING_SIGNALS:
            self.abandon_rest()
            if self.state.phase == "running":
                self.do_elastic([self.elastic.give_up()])  # what was lost is not replaced any more
            if self.state.phase == "killing":  # for the third time: no more patience with anybody
                self._give_up_zygote()
                return
        running = len(self.state.running)
        actions = self.state.on_signal(number, time.monotonic())
        if self.state.interrupted == number and running and self.state.started:
            name = signal.Signals(number).name + where
            if self.state.phase == "stopping":
                self._host.display.say(
                    f"phalanx run: {name}: stopping {_count(running)}, with "
                    f"{self.state.grace_s:g} s to end by themselves (again: kill at once)"
                )
            elif any(isinstance(action, Kill) for action in actions):
                self._host.display.say(f"phalanx run: {name} again: killing {_count(running)}")
        self.do(actions)

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
            self._pids, self.state.running, self.place.world_size, waited_s, self.flights.logs(), self.place.ranks
        )
        if not self.state.overdue:
            text += "\n`phalanx stacks` shows where they are; --exit-timeout SECONDS would stop them."
        self._host.display.say(text)


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"
