"""One attempt at a job: the event loop. What happens goes to `Supervision`; what that answers `HostRanks` does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.diagnostics.observer import GroupLog
from phalanx.diagnostics.progress_page import KIND as PROGRESS_PAGE
from phalanx.diagnostics.report_request import KIND as REPORT
from phalanx.errors import LaunchError
from phalanx.inspect.agent_socket import Request
from phalanx.inspect.stacks.job_snapshot import JobSnapshot, answer
from phalanx.ipc.signals import read_signals
from phalanx.launch import limits
from phalanx.launch.agent.elastic_actions import BeginGeneration
from phalanx.launch.agent.host import Host
from phalanx.launch.agent.host_ranks import HostRanks, count_ranks
from phalanx.launch.agent.supervision import Kill
from phalanx.launch.agent.watch import Accused, Watch, describe_slow, describe_wait, read_stack
from phalanx.launch.environment import Place
from phalanx.launch.failure import summarise
from phalanx.launch.plan import JobPlan
from phalanx.processes import ENDING_SIGNALS, STACKS_SIGNAL, name_signal, read_state

_READ_S = 0.05  # a flood of output makes way for signals and events this often
_REPORT_END_AFTER_S = 1.0
_LONGEST_WAIT_S = 3600.0  # poll takes milliseconds, in an int
_MAX_STILLBORN = 3
_OF_RANKS = ("group", PROGRESS_PAGE, "elastic", "store", REPORT)  # what only they may say, who have the token
_MAX_KNOCKING = 256  # ranks whose connection comes before the zygote's word that they exist


class Attempt(HostRanks):
    """Forks the ranks of `place` and sees them to their end."""

    def __init__(
        self,
        plan: JobPlan,
        host: Host,
        restart_count: int,
        place: Place | None = None,
        first: BeginGeneration | None = None,
    ) -> None:
        """`place` has the numbers of the processes; `first` is the generation of an elastic job that they come to."""
        super().__init__(plan, host, restart_count, place, first)
        self._knocking: list[Request] = []
        self._stillborn = 0  # zygotes in a row that have died before they were asked for anybody
        self._report_end_at: float | None = None
        self._watch = Watch(plan.settings.evict_after_s, time.monotonic())
        self._started_ns = time.monotonic_ns()
        self.report_hosts: dict[str, tuple[float, float]] = {}  # others: what their clock is behind, what a core copies
        self.report_folder = os.path.abspath(plan.settings.report) if plan.settings.report is not None else ""

    def run(self) -> None:
        """Return when every rank has ended, every process below the zygote is gone and every line was queued.

        What is in `flights` stays until `close`.
        """
        self._host.errors.begin(self._restart_count, self.place.num_ranks)
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
            self._processes.close()
            for fd in (*self._old_stores.values(), *([self._store] if self._store is not None else [])):
                os.close(fd)

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
                    self._on_event(event.content)
                if control.gone:
                    self._lose_zygote()
            if host.display.reader_gone and self.state.interrupted is None:
                self.abandon_rest()
                host.display.say(
                    "phalanx run: nobody reads its output any more (stdout was closed): stopping "
                    f"{count_ranks(len(self.state.running))}"
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
        """Tell what has happened while the others take their time to end: whoever looks on does not wait for them."""
        failures, running = self.state.failures, len(self.state.running)
        if failures and running and self.state.interrupted is None and not self.state.overdue:
            self._host.display.say(
                f"phalanx run: rank {failures[0].rank} has failed: {summarise(failures[0])}. More when all have ended: "
                f"{count_ranks(running)} may still take up to {self.state.grace_s:g} s"
            )

    @property
    def first(self) -> int | None:
        """The rank whose traceback will be told at the end; None if none will be."""
        failures = [] if self.state.interrupted is not None or self.state.overdue else self.state.failures
        return failures[0].rank if failures and failures[0].report is not None else None

    def _lose_zygote(self) -> None:
        """Start another zygote in place of one that has ended, where the ranks outlive it; else end the job."""
        zygote, adopted = self._host.zygote, self._host.adopted
        ranks = {pid: rank for rank, pid in self._processes.pids.items() if rank in self.state.running}
        # A rank that is lost was started: what becomes of it may not be decided yet.
        expected = {*self.state.started, *self.elastic.awaited}
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
        adopted.signal(
            signal.SIGKILL, [rank for pid, rank in ranks.items() if self.elastic.is_evicted(pid)], group=True
        )
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
            then = "its spare takes its place" if self._host.zygote.was_spare else "another one is started"
            self._host.display.say(f"{said}; {then}")
            for rank in self.elastic.awaited:  # whom the old one was told to fork, and did not tell of
                self._fork(rank)
                self._host.zygote.let_go_of_lost(rank)
            self._host.zygote.keep_spare()
        self._reap_adopted()

    def _reap_adopted(self) -> None:
        """Read the ends of ranks whose zygote has gone: nobody else tells of them."""
        sessions = self._host.adopted.sessions
        self._bury(list(self._host.adopted.reap(self._host.zygote.pid)))
        if sessions != self._host.adopted.sessions:
            self._host.zygote.guard(self._host.adopted.sessions)

    def _on_event(self, event: dict[str, Any]) -> None:
        self._zygote_is_new = False
        if event["event"] == "started":
            self._has_started = True
            self._processes.pids[event["rank"]] = event["pid"]
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
        elif event["event"] == "spare":
            self._host.zygote.on_spare(event["pid"])
            if self.state.phase == "running":
                self._host.zygote.keep_spare()

    def _look(self, now: float) -> None:
        """Whom do the others wait for? Costs some milliseconds of this process, every few seconds."""
        watch = self._watch
        pids = {rank: self._processes.pids[rank] for rank in self.state.running if rank in self._processes.pids}
        groups, steps_ns = self.flights.logs(), {pid: at for pid in pids.values() if (at := self._last_step_ns(pid))}
        if watch.is_due(now):
            for accused in watch.look(pids, groups, steps_ns, self._processes.stacks, now):
                self.send_signal(STACKS_SIGNAL, (accused.rank,), group=False)
            slow = watch.find_slow(now)
            rank = next((rank for rank, pid in pids.items() if slow is not None and pid == slow.pid), None)
            if slow is not None and rank is not None:
                self._host.display.say(describe_slow(slow, rank))
        for accused in watch.judge(pids, groups, steps_ns, now):
            if self._processes.pids.get(accused.rank) == accused.pid:
                self._sentence(accused, groups)

    def _last_step_ns(self, pid: int) -> int:
        """When the process has last completed a step; 0 if it does not say."""
        progress = self.pages.read(pid)
        tracks = (progress.loop, progress.state) if progress is not None else ()
        return max((track.recent[-1][0] for track in tracks if track is not None), default=0)

    def _sentence(self, accused: Accused, groups: Sequence[GroupLog]) -> None:
        """Tell of a rank that keeps the others waiting; kill it if that was asked for."""
        rank_of = {pid: rank for rank, pid in self._processes.pids.items()}
        text = describe_wait(accused, rank_of, groups)
        stack = read_stack(self._processes.stacks[accused.rank], accused.offset)
        told = f"phalanx run: {text}" + (f"\n{textwrap.indent(stack.rstrip(), '  ')}" if stack else "")
        if not accused.evict:
            self._host.display.say(f"{told}\n--evict-after SECONDS would kill it.")
            return
        why = f"the others waited for it for {accused.silent.silent_s:.1f} s"
        if not accused.silent.waiting:
            why = f"it had done nothing for {accused.silent.silent_s:.1f} s"
        why += f" (--evict-after {self._plan.settings.evict_after_s:g})"
        if self.elastic.claims(accused.rank, accused.pid):
            if not self.elastic.is_evicted(accused.pid):  # else the zygote, or the kernel, takes its time to end it
                self._host.display.say(told)
            self.do_elastic(self.elastic.evict(accused.rank, why, time.monotonic()))
        else:
            self._evicted[accused.pid] = f"It was killed: {text} (--evict-after).\n\n{stack}".rstrip()
            self.send_signal(signal.SIGKILL, (accused.rank,), group=True)

    def _hear_ranks(self, ready: set[int]) -> None:
        for fd in self.links.waiting:
            if fd in ready:
                self.links.send_waiting(fd)
        for fd in self.links.fds:
            if fd in ready:
                for rank, pid, message in self.links.read(fd):
                    self.on_rank_message(rank, pid, message)

    def _admit(self, request: Request) -> None:
        """Take the connection that a rank opens to tell that it survives the loss of others.

        Which process it is the kernel says: what a rank has started knows the token, too.
        """
        pid = request.channel.peer.pid
        rank = next((rank for rank, known in self._processes.pids.items() if known == pid), None)
        if rank is None and self._awaits_start:
            self._knocking.append(request)  # the zygote's word may be on its way
            if len(self._knocking) > _MAX_KNOCKING:
                self._knocking.pop(0).close()
            return
        if rank is None:
            self._refuse(request, pid)
            return
        for fd in request.fds:
            os.close(fd)
        self._host.zygote.let_go_of_lost(rank)
        self._host.zygote.warm_up()
        self._host.zygote.keep_spare()
        self.links.admit(request.channel, rank, pid, {"kind": "welcome", "generation": self.generation})
        self.on_rank_message(rank, pid, request.message)

    @property
    def _awaits_start(self) -> bool:
        """Whether a process of this host may have been forked without our knowing it yet."""
        return any(rank in self.place.ranks and rank not in self._processes.pids for rank in self.state.running)

    def _refuse(self, request: Request, pid: int) -> None:
        """Take in a process that is none of the ranks and wants to be one: below `phalanx run bash train.sh`, say."""
        why = f"phalanx.elastic works in a process that phalanx run has started itself, and pid {pid} is none of them"
        request.channel.put({"kind": "refused", "why": why})
        request.close()
        if pid not in self._processes.lost_ns and read_state(pid) not in ("", "Z"):  # it may have been one until now
            self._host.agent_socket.notice("no rank", f"{why}. To this one, the loss of a rank is the end of the job")

    def _admit_early(self) -> None:
        knocking, self._knocking = self._knocking, []
        for request in knocking:
            self._admit(request)

    def _receive(self, fd: int) -> None:
        """Answer a request: of a rank that shows us its memory, or somebody who wants to know where the ranks are."""
        request = self._host.agent_socket.read(fd)
        if request is not None:
            self._answer(request)
        for notice in self._host.agent_socket.take_notices():
            self._host.display.say(f"phalanx run: {notice}")

    def _answer(self, request: Request) -> None:
        kind = request.message.get("kind")
        if kind in _OF_RANKS and not self._host.agent_socket.has_token(request):
            request.close()
        elif kind == "group":
            request.channel.close()
            self.flights.add(request.message, request.fds, self._processes.lost_ns)
        elif kind == PROGRESS_PAGE:
            self.pages.add(request.channel.peer.pid, request.fds)
            request.channel.close()
        elif kind == REPORT:
            self.report_folder = self.report_folder or str(request.message.get("folder", ""))
            request.close()
        elif kind == "elastic":
            self._admit(request)
        elif kind == "stacks of other hosts":
            self.ask_other_hosts(request)
        else:
            if kind == "store" and self._store is not None:
                with contextlib.suppress(OSError):  # no descriptor is free
                    request.channel.put({}, [self._store])
            elif kind == "snapshot":
                self._answer_snapshot(request)
            request.close()

    def _answer_snapshot(self, request: Request) -> None:
        """Who the ranks are, and copies of what they write."""
        living = [rank for rank in self.state.running if rank in self._processes.pids]
        observed = self.flights.observed
        pages = self.pages.fds_of([self._processes.pids[rank] for rank in living])
        with_stacks = bool(request.message.get("stacks", True))
        snapshot = JobSnapshot(
            os.getpid(),
            self._plan.settings.target.name,
            self.place.world_size,
            self._host.zygote.pid,
            tuple((rank, self._processes.pids[rank]) for rank in living),
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
        stacks = [self._processes.stacks[rank] for rank in living] if with_stacks else []
        answer(request.channel, snapshot, stacks, [observer.control for observer in observed], list(pages.values()))

    def on_signal(self, number: int, where: str = "") -> None:
        """Follow a signal that has come, here or at the agent of another host (`where`)."""
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
                    f"phalanx run: {name}: stopping {count_ranks(running)}, with "
                    f"{self.state.grace_s:g} s to end by themselves (again: kill at once)"
                )
            elif any(isinstance(action, Kill) for action in actions):
                self._host.display.say(f"phalanx run: {name} again: killing {count_ranks(running)}")
        self.do(actions)
