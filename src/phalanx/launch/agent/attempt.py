"""One attempt at a job: the event loop. What happens goes to `Supervision`; what that answers is done here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.arena.nameless import create
from phalanx.launch import wire
from phalanx.launch.agent.door import Door
from phalanx.launch.agent.flights import Flights
from phalanx.launch.agent.signals import read_signals
from phalanx.launch.agent.supervision import Action, Kill, Supervision
from phalanx.launch.agent.zygote_process import ZygoteProcess
from phalanx.launch.environment import plan_rank_environment
from phalanx.launch.failure import Exit, Report
from phalanx.launch.output.pump import Pump
from phalanx.launch.plan import JobPlan
from phalanx.launch.processes import name_signal
from phalanx.launch.stacks.look import Look, answer

_MAX_REPORT_BYTES = 1 << 18
_MAX_DUMP_BYTES = 1 << 16
_SWEEP_LIMIT_S = 6.0  # a zygote that has not swept by then is given up: the agent sweeps


@dataclass(frozen=True)
class Host:
    """What outlives an attempt: the zygote, the way out for lines, where signals arrive, where visitors come."""

    zygote: ZygoteProcess
    pump: Pump
    signals: int
    door: Door


class Attempt:
    """Forks all ranks and sees them to their end."""

    def __init__(self, plan: JobPlan, host: Host, restart_count: int) -> None:
        self._plan = plan
        self._host = host
        self._restart_count = restart_count
        self._pids: dict[int, int] = {}
        self._dumps: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        self._store: int | None = None
        self._swept = False
        self.zygote_lost = False
        self.state = Supervision(plan.num_ranks, plan.settings.grace_s)
        self.flights = Flights()

    def run(self) -> None:
        """Returns when every rank has ended, every process below the zygote is gone and every line was queued.

        What is in `flights` stays until `close`.
        """
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        store = self._store = _create_store()
        try:
            with reports, theirs:
                self._reports = reports
                self._fork_all(theirs.fileno(), store)
                self._loop(lambda: self.state.finished)
                if not self.zygote_lost:
                    self._host.zygote.sweep()
                    limit = time.monotonic() + _SWEEP_LIMIT_S
                    self._loop(lambda: self._swept or time.monotonic() > limit, limit)
                    self._host.pump.drain()
        finally:
            for fd in (*self._dumps.values(), *self._stacks.values(), *([store] if store is not None else [])):
                os.close(fd)

    @property
    def ended_ns(self) -> dict[int, int]:
        """When the ranks' processes ended, by process number, on CLOCK_MONOTONIC."""
        return {end.pid: int(end.at * 1e9) for end in self.state.exits.values()}

    def close(self) -> None:
        """Let go of what the ranks have shown us."""
        self.flights.close()

    def _fork_all(self, reports: int, store: int | None) -> None:
        path = "" if store is None else f"/proc/{os.getpid()}/fd/{store}"
        job = self._plan.describe_job(self._restart_count, path, self._host.door.address)
        for rank in range(self._plan.num_ranks):
            dump = self._dumps[rank] = _create_scratch("phalanx-dump")
            stacks = self._stacks[rank] = _create_scratch("phalanx-stacks")
            ends = []
            for stream in (1, 2):
                ours, its = os.pipe()
                self._host.pump.add(rank, stream, ours)
                ends.append(its)
            cpus = self._plan.placement.cpus[rank]
            self._host.zygote.fork(rank, plan_rank_environment(job, rank), cpus, [*ends, reports, dump, stacks])
            for end in ends:
                os.close(end)

    def _loop(self, done: Callable[[], bool], limit: float | None = None) -> None:
        host = self._host
        while not done() and not self.zygote_lost:
            poll = select.poll()
            control = host.zygote.control.fileno()
            for fd in (host.signals, control, self._reports.fileno(), *host.pump.pipes, *host.door.fds):
                poll.register(fd, select.POLLIN)
            for writer in host.pump.writers:
                poll.register(writer.fd, select.POLLOUT)
            times = [at for at in (self.state.next_due, host.pump.next_due, limit) if at is not None]
            left_s = max(0.0, min(times) - time.monotonic()) if times else None
            ready = {fd for fd, _ in poll.poll(None if left_s is None else left_s * 1000 + 1)}
            for fd in host.pump.pipes:
                if fd in ready:
                    host.pump.read(fd)
            if host.signals in ready:
                for number in read_signals(host.signals):
                    self._on_signal(number)
            for fd in host.door.fds:
                if fd in ready:
                    self._receive(fd)
            if self._reports.fileno() in ready:
                self._read_reports()
            if control in ready:
                self._on_event()
            if host.pump.reader_gone and self.state.interrupted is None:
                self._do(self.state.on_signal(signal.SIGPIPE, time.monotonic()))
            self._do(self.state.on_time(time.monotonic()))
            host.pump.tick()

    def _on_event(self) -> None:
        received = wire.receive(self._host.zygote.control)
        if received is None:
            self.zygote_lost = True
            return
        event = received[0]
        if event["event"] == "started":
            self._pids[event["rank"]] = event["pid"]
            self.state.on_started(event["rank"])
        elif event["event"] == "exit":
            self._read_reports()  # what a rank told before its end counts before its end
            rank = event["rank"]
            dump = os.pread(self._dumps[rank], _MAX_DUMP_BYTES, 0).decode(errors="replace")
            self._do(self.state.on_exit(Exit(rank, event["pid"], event["status"], event["at"], dump)))
        elif event["event"] == "swept":
            self._swept = True

    def _receive(self, fd: int) -> None:
        """A visitor: a rank that shows us its memory, or somebody who wants to know where the ranks are."""
        visit = self._host.door.read(fd)
        if visit is None:
            return
        knows_us = visit.message.get("token") == self._host.door.token
        if visit.message.get("kind") == "group" and knows_us:
            visit.sock.close()
            self.flights.add(visit.message, visit.fds)
            return
        if visit.message.get("kind") == "store" and knows_us and self._store is not None:
            with contextlib.suppress(OSError):  # it did not wait
                socket.send_fds(visit.sock, [b"store"], [self._store])
        if visit.message.get("kind") == "look":
            living = [rank for rank in self.state.running if rank in self._pids]
            observed = self.flights.observed
            look = Look(
                os.getpid(),
                self._plan.settings.target.name,
                self._plan.num_ranks,
                self._host.zygote.pid,
                tuple((rank, self._pids[rank]) for rank in living),
                tuple(observer.card for observer in observed),
            )
            answer(visit.sock, look, [self._stacks[r] for r in living], [observer.control for observer in observed])
        visit.close()

    def _read_reports(self) -> None:
        while True:
            try:
                data = self._reports.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                return
            self._do(self.state.on_report(Report.from_bytes(data), time.monotonic()))

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # the zygote's end shows on its socket
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks stop with us, and go on with us
            self._host.zygote.signal(signal.SIGSTOP, self.state.running, group=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        running = len(self.state.running)
        actions = self.state.on_signal(number, time.monotonic())
        if self.state.interrupted == number and running and self.state.started:
            name = signal.Signals(number).name
            if self.state.phase == "stopping":
                self._host.pump.say(
                    f"phalanx run: {name}: stopping {running} rank{'s' * (running > 1)}, with "
                    f"{self.state.grace_s:g} s to end by themselves (again: kill at once)"
                )
            elif any(isinstance(action, Kill) for action in actions):
                self._host.pump.say(f"phalanx run: {name} again: killing {running} rank{'s' * (running > 1)}")
        self._do(actions)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                if not self.state.started:  # the zygote is still importing and can't hear us
                    self._host.zygote.kill()
                else:
                    self._host.zygote.sweep()
            else:
                self._host.zygote.signal(action.signum, action.ranks, group=action.group)


def _create_scratch(name: str) -> int:
    """A file without a name that a rank writes, and we read when it can't speak any more; a write adds to its end."""
    if sys.platform != "linux":
        return os.open(os.devnull, os.O_RDWR)
    fd = create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _create_store() -> int | None:
    """A file without a name, which the ranks open through this process: gone with it, and no port opened."""
    return create("phalanx-store") if sys.platform == "linux" else None


def describe_signal_end(state: Supervision) -> str:
    """One line on how a job ended that was told to stop."""
    assert state.interrupted is not None
    name = name_signal(state.interrupted)
    if not state.killed:
        return f"phalanx run: stopped by {name}"
    ranks = ", ".join(str(rank) for rank in state.killed)
    return (
        f"phalanx run: stopped by {name}; rank{'s' * (len(state.killed) > 1)} {ranks} did not end within "
        f"{state.grace_s:g} s and had to be killed (--grace gives them more)"
    )
