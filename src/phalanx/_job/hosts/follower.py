"""`FollowerLink` reports the events of this host's ranks to the leader, and executes the leader's orders.

If the leader is lost and no other host is elected, this host stops its ranks and exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx._base.loss_detection import HOST_LOSS_GRACE_S
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.diagnostics.printable import printable
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.rendezvous.agent_file import LostHost, create_agent_file, describe_loss, report_lost
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic import Elastic
from phalanx._job.agent.elastic_actions import LEAVE, BeginGeneration, ElasticAction
from phalanx._job.agent.environment import Place
from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.generation import SlotPlan
from phalanx._job.agent.host_link import HostLink
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.supervision import Action, Kill, Signal, Supervision
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage
from phalanx._job.hosts.job_membership import JobMembership
from phalanx._job.hosts.line_forwarder import LineForwarder
from phalanx._job.hosts.succession.follower_succession import FollowerSuccession, Leadership
from phalanx._job.inspect.stacks.report import report_own_stacks
from phalanx._job.inspect.top.look import read_own_host
from phalanx._job.inspect.top.memory import MemoryReader
from phalanx._job.output.display import Display

_FULL_S = 0.02  # the time between checks of a full channel
_WAIT = {"kind": "wait"}  # sent to ranks


@dataclass
class FollowerSupervision(Supervision):
    """`FollowerSupervision` reports each event to the leader, and executes the leader's orders."""

    place: Place = field(default_factory=lambda: Place.alone(1))
    channel: ControlChannel | None = None
    attempt: int = 0
    num_signals: int = 0
    reported_signal: int = 0  # the signal last reported to the leader
    reported_to: int = -1  # that leader's member number
    is_elastic: bool = False  # a rank of this host has reported that it survives the loss of other ranks
    abandoned_by: str = ""  # why the leader is lost; empty unless it is lost and no other host was elected
    leaves: bool = False  # the job continues without this host, whose ranks finish their step and exit

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks of this host that have not exited."""
        return tuple(rank for rank in self.place.ranks if self.is_running(rank))

    def is_running(self, rank: int) -> bool:
        """Return whether this rank is on this host, and has not exited."""
        return rank in self.place.ranks and rank not in self.exits and rank not in self.abandoned

    @property
    def finished(self) -> bool:
        """Return whether no rank runs or will be started; an elastic job may replace lost ranks."""
        is_replaced = self.is_elastic and self.phase == "running" and not self.leaves
        awaits_orders = is_replaced and not all(end.is_orderly for end in self.exits.values())
        return not self.running and not awaits_orders

    def _report(self, kind: str, **body: Any) -> None:
        if self.channel is not None:
            self.channel.put(self.channel.first, kind, attempt=self.attempt, **body)

    def on_replaced(self, rank: int) -> None:
        """Forget the exit of a rank that is replaced."""
        super().on_replaced(rank)
        self.exits.pop(rank, None)
        self.reports.pop(rank, None)

    def on_abandoned(self, rank: int) -> None:
        """Report to the leader that a rank was not started."""
        super().on_abandoned(rank)
        self._report("abandoned", rank=rank)

    def on_exit(self, exit: Exit) -> list[Action]:
        self.exits[exit.rank] = exit
        self._report("exit", rank=exit.rank, pid=exit.pid, status=exit.status, at=exit.at, dump=exit.dump)
        return []

    def on_report(self, report: ExceptionReport, now: float) -> list[Action]:
        self.reports.setdefault(report.rank, report)
        self._report("report", report=asdict(report))
        return []

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """Report a signal to the leader, which decides how to react."""
        if self.abandoned_by or self.leaves or signum not in ENDING_SIGNALS:
            return super().on_signal(signum, now)
        self.num_signals += 1
        if self.num_signals > 2:  # the leader has not reacted to the first two
            self.interrupted = signum
            return self._kill(now)
        self._report_signal(signum)
        return []

    def _report_signal(self, signum: int) -> None:
        """Report a signal to the leader, which decides for all hosts."""
        if self.channel is not None:
            self.reported_signal, self.reported_to = signum, self.channel.first
        self._report("signal", signum=signum)

    def repeat_signal(self) -> None:
        """Report a signal again to a new leader, because the former leader may not have received it."""
        is_undecided = self.reported_signal and self.phase == "running" and not self.leaves
        if is_undecided and self.channel is not None and self.channel.first != self.reported_to:
            self._report_signal(self.reported_signal)

    def on_remote_signal(
        self, signum: int, ranks: Iterable[int], group: bool, is_relayed: bool = False
    ) -> list[Action]:
        """Execute the leader's order to send `signum` to ranks of this host."""
        chosen = tuple(rank for rank in ranks if rank in self.running)
        if signum in ENDING_SIGNALS and self.phase == "running":
            self.phase = "stopping"
        return [Signal(signum, chosen, group, is_relayed)] if chosen else []

    def sweep(self) -> list[Action]:
        """Execute the leader's order to kill all processes."""
        self.phase = "killing"
        return [Kill()]

    def on_leader_lost(self, why: str, now: float) -> list[Action]:
        """Stop the ranks, because the job no longer has a leader."""
        if self.abandoned_by:
            return []
        self.abandoned_by = why
        if self.phase == "stopping":
            return self._stop(signal.SIGTERM, now)
        return self._await_reports(now, HOST_LOSS_GRACE_S)


def is_leader_loss(change: Change, first: int) -> bool:
    """Return whether a change means that this host has lost its leader, the member `first`."""
    return change.kind in ("unreachable", "expelled") or (change.member == first and change.kind in ("left", "lost"))


def show_host_lost(message: ControlMessage, display: Display) -> None:
    """Show the leader's message that another host is lost."""
    ranks = message.body["ranks"]
    host, why = printable(str(message.body["host"])), printable(str(message.body["why"]))
    display.print(f"phalanx run: {host}, with {name_ranks(ranks)}, is lost: {why}")


class ObservedElastic(Elastic):
    """`ObservedElastic` records the reports of this host's ranks; the leader decides."""

    @property
    def active(self) -> bool:
        return False

    def on_message(self, slot: int, pid: int, message: Mapping[str, Any], now: float) -> list[ElasticAction]:
        """Record a rank's message, such as its generation."""
        super().on_message(slot, pid, message, now)
        member = self.members.get(slot)
        if message.get("kind") == "elastic" and message.get("generation") and member is not None:
            member.holds_state = False  # it joins later, and receives the state
        return []


class FollowerLink(HostLink):
    """A `FollowerLink` is an attempt's link to the leader: it reports on this host's ranks, and receives orders."""

    def __init__(
        self,
        plan: JobPlan,
        host: HostResources,
        number: int,
        place: Place,
        membership: JobMembership,
        first: BeginGeneration | None,
        succession: FollowerSuccession,
    ) -> None:
        """Create the link of attempt `number`."""
        channel = membership.channel
        super().__init__(plan, place, channel.member, first)
        self.wait_s = 0.0  # how long elastic ranks wait for hosts
        self.ended: dict[str, Any] | None = None  # the body of the leader's message `end`, once received
        self.supervision = FollowerSupervision(
            place.world_size, plan.settings.shutdown_timeout_s, place=place, channel=channel, attempt=number
        )
        self._host = host
        self._attempt: Attempt
        self._began_at = time.monotonic()
        self._channel = channel
        self._number = number
        self._membership = membership
        assert isinstance(host.pump.viewer, LineForwarder)
        self._forward = host.pump.viewer
        self._forward.attempt = number
        self._memory = MemoryReader()
        self._records: list[tuple[str, dict[str, Any]]] = []  # kinds and bodies of messages
        self._succession = succession
        self._ignores_leader_loss = False  # the leader has left while this host leaves, too: its loss is ignored

    def attach(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._succession.attach(attempt)

    def make_supervision(self) -> FollowerSupervision:
        """Return the supervision that reports to the leader, which decides."""
        return self.supervision

    def make_elastic(self) -> ObservedElastic:
        return ObservedElastic(SlotPlan.begin([self.own_slots()]), self._plan.settings.max_restarts)

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        return (self._channel.fileno(), *self._succession.fds)

    @property
    def due(self) -> float | None:
        """Return when to call `receive` even if no descriptor is ready; None for never."""
        if self._channel.has_more:
            return time.monotonic()
        return time.monotonic() + _FULL_S if self._channel.full else None

    def receive(self, ready: set[int]) -> None:
        """Process the messages from other hosts, and the result of an election."""
        if self._channel.fileno() in ready or self._channel.has_more:
            for message in self._channel.receive():
                self._read(message)
        leadership = self._succession.receive(ready)
        if leadership is Leadership.OWN:  # this host leads: the attempt has another link now
            reported_signal = self.supervision.reported_signal  # the former leader can no longer answer
            if reported_signal and not self.supervision.leaves:
                self._attempt.on_signal(reported_signal)
            return
        if leadership is Leadership.NONE and not self.supervision.abandoned_by:
            self._abandon_ranks(self._succession.loss)
        if leadership is Leadership.KNOWN:
            self.supervision.repeat_signal()
        self._forward.flush()

    def create_store(self) -> tuple[int | None, str]:
        """Create a file with the coordinator's address for the ranks; return its descriptor and PHALANX_STORE."""
        return create_agent_file(*self._membership.open_store())

    def on_started(self, rank: int, pid: int) -> None:
        """Report the start of a rank to the leader."""
        self._channel.put(self._channel.first, "started", attempt=self._number, rank=rank, pid=pid)

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Forward an elastic rank's message to the leader."""
        if message.get("kind") == "elastic":
            self.supervision.is_elastic = True
            wait_s = message.get("wait_s")
            self.wait_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0
        if self.supervision.leaves and message.get("kind") in ("elastic", "waiting"):  # it has connected only now
            self._attempt.links.send(rank, LEAVE)
        if self._succession.is_open and message.get("kind") == "waiting":
            self._attempt.links.send(rank, _WAIT)
        self._channel.put(
            self._channel.first, "rank message", attempt=self._number, rank=rank, pid=pid, message=message
        )

    def end(self, attempt: Attempt) -> None:
        """Send the leader all records, and then the report that every process of this host has exited."""
        self._forward.flush()
        if attempt.ranks.zygote_lost and not attempt.ranks.zygote_killed:
            return
        ended_ns = {str(pid): at for pid, at in attempt.ended_ns.items()}
        if attempt.report_folder:
            self._records += self._pack_report(attempt.report_folder)
        for log in attempt.collect_logs():  # together, the logs may exceed the limit of one message
            self._records.append(("flight", {"groups": [asdict(log)], "ended_ns": ended_ns}))
        self.send_records()

    def send_records(self) -> None:
        """Send the leader the records of this host's ranks, after all of the ranks have exited."""
        for kind, body in self._records:
            self._channel.put(self._channel.first, kind, attempt=self._number, **body)
        self._channel.put(self._channel.first, "swept", attempt=self._number)

    @property
    def has_finished(self) -> bool:
        """Return whether all ranks of this host have succeeded."""
        exits = self.supervision.exits
        return all(rank in exits and not exits[rank].status for rank in self.place.ranks)

    def close(self) -> None:
        """Send the remaining lines."""
        self._forward.flush()

    def _pack_report(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages with this host's part of the job's report.

        Remove each file after its message, unless the leader is lost.
        """
        from phalanx._job.report.copy_speed import measure_copy_speed  # here, because most jobs write no report
        from phalanx._job.report.job_record import RANKS
        from phalanx._job.report.transfer import pack_files

        for name, text in pack_files(folder, self._plan.run, self._began_at):
            yield "rank file", {"name": name, "text": text}
            if not self.supervision.abandoned_by:
                with contextlib.suppress(OSError):  # the folder is no longer writable
                    os.unlink(os.path.join(folder, RANKS, name))
        with contextlib.suppress(OSError):  # the folder is not empty, or shared
            os.rmdir(os.path.join(folder, RANKS))
        yield "report host", {"host": socket.gethostname(), "copy_bytes_per_s": measure_copy_speed()}

    def _read(self, message: ControlMessage | Change) -> None:
        state = self.supervision
        if self._succession.process(message):
            return
        if isinstance(message, Change):
            if is_leader_loss(message, self._channel.first):
                self._lose_leader(message.why)
        elif message.member == self._channel.first and message.kind == "host lost":
            show_host_lost(message, self._host.display)
            self._notify_ranks(message.body["gone"], describe_loss(message.body["host"], message.body["why"]))
        elif message.member == self._channel.first and message.kind == "transfer leadership":
            self._ignores_leader_loss = state.leaves
            self._lose_leader("it leaves (SIGTERM)", has_left=True)
        elif message.member == self._channel.first and message.kind == "end":
            self.ended = message.body
            self._attempt.do(state.sweep() if not state.finished else [])
        elif message.member == self._channel.first and message.body.get("attempt") == self._number:
            if message.kind == "leave":
                state.leaves = True
                for rank in self.place.ranks:
                    self._attempt.links.send(rank, LEAVE)
                text = (
                    "SIGTERM: the ranks of this host finish their step and exit; the others continue (again: stop them)"
                )
                self._host.display.print(f"phalanx run: {text}")
            elif message.kind == "signal":
                signum = int(message.body["signum"])
                if signum in ENDING_SIGNALS:
                    self._attempt.ranks.abandon_rest()
                group, is_relayed = bool(message.body["group"]), bool(message.body.get("is_relayed"))
                self._attempt.do(state.on_remote_signal(signum, message.body["ranks"], group, is_relayed))
            elif message.kind == "generation":
                self._attempt.begin_generation(BeginGeneration.from_json(message.body["begun"]))
            elif message.kind == "send generation":
                self._attempt.send_generation(int(message.body["rank"]))
            elif message.kind == "to rank":
                self._attempt.send_to_rank(int(message.body["rank"]), message.body["message"])
            elif message.kind == "stacks":
                asked = (message.body["request"], message.body.get("what"))
                threading.Thread(target=self._send_stacks, args=asked, daemon=True).start()
            elif message.kind == "sweep":
                self._attempt.ranks.abandon_rest()
                self._attempt.do(state.sweep())

    def _send_stacks(self, request: Any, what: Any) -> None:
        """Send the leader the stacks of this host's ranks, or their state for `phalanx top`.

        This runs in a thread, because the ranks may take a second to answer.
        """
        text = read_own_host(self._memory) if what == "top" else report_own_stacks()
        self._channel.put(self._channel.first, "stacks", attempt=self._number, request=request, text=text)

    def _lose_leader(self, why: str, *, has_left: bool = False) -> None:
        if self.supervision.abandoned_by or self.ended is not None or self._ignores_leader_loss:
            return
        may_continue = self.supervision.phase == "running" and not self.supervision.leaves
        if not (may_continue and self._succession.on_leader_lost(why, has_left=has_left)):
            self._abandon_ranks(why)

    def _abandon_ranks(self, why: str) -> None:
        """Stop the ranks of this host, because the job no longer has a leader."""
        running = len(self._attempt.state.running)
        self._host.display.print(
            f"phalanx run: the first host is lost: {why}. Stopping the {running} rank{'s' * (running != 1)} of this "
            "host"
        )
        self._attempt.ranks.abandon_rest()
        now = self._attempt.numbers.part.place
        others = [rank for rank in range(now.world_size) if rank not in now.ranks]
        self._notify_ranks(others, f"this host lost its connection to the first host ({why})")
        actions = self.supervision.on_leader_lost(why, time.monotonic())
        # Elastic ranks without a leader cannot continue: the other hosts continue without them, or the job is lost.
        self._attempt.do(self.supervision.sweep() if self.supervision.is_elastic else actions)

    def _notify_ranks(self, ranks: Sequence[int], reason: str) -> None:
        if self._attempt.numbers.store is not None:
            report_lost(self._attempt.numbers.store, LostHost(tuple(ranks), reason))
