"""`LeaderLink` leads a job while ranks run: it decides for all hosts, shows all output, and returns the exit code."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx._base.loss_detection import HOST_SWEEP_S
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.control.wire import MALFORMED
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._comm.diagnostics.printable import printable, printable_lines
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.rendezvous.agent_file import LostHost, create_agent_file, describe_loss, report_lost
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic_actions import LEAVE, BeginGeneration, DropHost, PrepareHost
from phalanx._job.agent.failure import ExceptionReport, Exit, HostLoss
from phalanx._job.agent.generation import ArrivedHost, HostSlots
from phalanx._job.agent.host_link import HostLink
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.supervision import Action
from phalanx._job.hosts.control_channel import Change, ControlMessage, decode_lines
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import HostFacts, Node, describe_unfit, find_conflict, find_node
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.hosts.succession.leader_notice import describe_second_job
from phalanx._job.hosts.succession.leader_succession import LeaderSuccession
from phalanx._job.inspect.agent_socket import ClientRequest
from phalanx._job.inspect.flight import logs_from_json, merge_logs
from phalanx._job.inspect.stacks.job_snapshot import HostAnswer, answer_others
from phalanx._job.output.display import Display
from phalanx._job.output.screen import find_template

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


class LeaderLink(HostLink):
    """A `LeaderLink` is the leader's link of an attempt: it processes other hosts' messages, and sends decisions."""

    def __init__(
        self,
        plan: JobPlan,
        host: HostResources,
        restart_count: int,
        peers: PeerHosts,
        store: tuple[str, ...],
        guard: LeadGuard | None = None,
        elastic: ElasticHosts | None = None,
        begun: BeginGeneration | None = None,
    ) -> None:
        """Create the link of an attempt.

        Arguments:
            store: the coordinator's address on this host, the job's key, and the path of a relay if there is one.
            guard: the job's guard against two leaders; without it, no other host can take over.
            elastic, begun: on a host that has taken over, the restored state and the last generation that was begun.
        """
        super().__init__(plan, peers.own.place, peers.own.facts.member)
        self._host = host
        self._peers = peers
        self._store_location = store
        self._number = restart_count
        self._attempt: Attempt
        self._elastic = elastic or peers.plan_elastic(plan.settings.max_restarts, restart_count)
        self._swept_hosts: set[int] = set()
        self._started_hosts = set(peers.others)
        self._late = WaitingHosts(peers, host.display)
        self._sweep_limit: float | None = None
        self._records = HostRecords()
        self._stacks_requests = StacksRequests(peers, restart_count)
        self._remote_ranks = RemoteRanks(peers, self._elastic, host.display)
        self._succession = LeaderSuccession(
            guard, peers, self._elastic, host.display, plan, restart_count, begun, self._remove, self._release
        )

    def attach(self, attempt: Attempt) -> None:
        """Attach the link to its attempt, and make the display name the host of each rank."""
        self._attempt = attempt
        self._succession.attach(attempt)
        self._host.display.host_of = self._peers.name_host
        if template := find_template(self._plan.settings.log_line_prefix_template, self._plan.command_environment):
            self._host.display.prefix_of = lambda rank: self._peers.fill_prefix(template, rank)

    def make_elastic(self) -> ElasticHosts:
        """Return the object that decides how the job continues when ranks or hosts are lost."""
        return self._elastic

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> bool:
        return self._put_to_host_of(rank, "to rank", message=message)

    def send_generation(self, rank: int) -> bool:
        return self._put_to_host_of(rank, "send generation")

    def _put_to_host_of(self, rank: int, kind: str, **body: Any) -> bool:
        node = self._peers.find_other(rank)
        if node is not None:
            self._put(node, kind, rank=rank, **body)
        return node is not None

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Send each other host the generation; a host that has not started its ranks yet gets the order to start."""
        state, slots = self._attempt.state, begun.generation.slots
        state.world_size = max(state.world_size, max(slots) + 1)
        for slot in range(state.world_size):
            if slot in slots:
                state.retired.discard(slot)
            elif slot not in state.exits:
                state.on_retired(slot)
        for host in self._elastic.slot_plan.hosts:
            if host.member not in self._peers.others and host.member != self.member:
                self._admit_host(host, begun)
        self._succession.record(begun)
        for node in self._peers.present:
            part = begun.generation.part_of(node.facts.member)
            for slot in () if part is None else part.forked:
                state.on_replaced(slot)
            if node.facts.member in self._started_hosts:
                self._put(node, "generation", begun=begun.to_json())
            else:
                self._start(node, begun)
        self._succession.update_voters()

    def do(self, action: PrepareHost | DropHost) -> None:
        if isinstance(action, DropHost):
            self._drop(action)
            return
        node = self._admit_host(action.slots, action.begun)
        if node is not None:
            self._start(node, action.begun)

    def on_given_up(self) -> None:
        """Fail the job because of the lost hosts that no decision has covered yet."""
        state, gone = self._attempt.state, self._elastic.gone
        for member, why in self._peers.lost.items():
            node = self._peers.others[member]
            ranks = [rank for rank in node.place.ranks if rank in gone]
            if ranks:
                state.retired.difference_update(ranks)
                now = time.monotonic()
                loss = HostLoss(node.where, why, now - self._peers.host_timeout_s)
                self._attempt.do(state.on_host_lost(ranks, loss, now))

    def _admit_host(self, slots: HostSlots, begun: BeginGeneration) -> Node | None:
        """Accept a host that has joined; return None if it has left, or has no part in the generation."""
        part = begun.generation.part_of(slots.member)
        if part is None:
            return None
        place = replace(part.place, first_rank=slots.first_slot, num_ranks=slots.num_slots)
        node = self._peers.accept(slots, place)
        if node is not None:
            self._host.display.begin(place.ranks)
        return node

    def _start(self, node: Node, begun: BeginGeneration) -> None:
        self._started_hosts.add(node.facts.member)
        self._peers.send_start(node, self._plan, self._number, begun)

    def _drop(self, dropped: DropHost) -> None:
        node = self._peers.lose(dropped.member, dropped.why)
        if node is not None:
            for rank in node.place.ranks:
                self._host.display.end(rank)
            self._host.display.print(f"phalanx run: {node.where} was rejected: {dropped.why}")
            why = f"phalanx run: this host was rejected: {dropped.why}"
            self._peers.channel.put(dropped.member, "end", code=1, why=why)

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        # A slow reader of this host's output also delays the other hosts' lines, but not the end of the job.
        channel = self._peers.channel
        is_delayed = self._host.display.full and self._attempt.state.phase == "running"
        notices = (channel.notices.fileno(), *self._succession.fds)
        return notices if is_delayed else (channel.fileno(), *notices)

    @property
    def due(self) -> float | None:
        """Return when to call `receive` even if no descriptor is ready; None for never."""
        more = time.monotonic() if self._peers.channel.has_more else None
        dues = (self._sweep_limit, self._stacks_requests.due, self._succession.due, more)
        return min((at for at in dues if at is not None), default=None)

    def receive(self, ready: set[int]) -> None:
        """Process the messages of the other hosts, and act on expired time limits."""
        lines = self._peers.channel.notices.receive_all() if self._peers.channel.notices.fileno() in ready else []
        if self._peers.channel.fileno() in ready or self._peers.channel.has_more:
            for message in self._peers.channel.receive():
                self._read(message)
        for line in lines:
            self._host.display.print(f"phalanx run: {line}")
        self._succession.receive()
        self._stacks_requests.answer()
        if self._sweep_limit is not None and time.monotonic() >= self._sweep_limit:
            self._sweep_limit = None
            for node in self._peers.present:
                if node.facts.member not in self._swept_hosts:
                    self.lose(node.facts.member, f"it did not stop its ranks within {HOST_SWEEP_S:g} s")
                    self._peers.channel.expel(node.facts.member)  # this also notifies the host

    def create_store(self) -> tuple[int | None, str]:
        """Create a file with the coordinator's address for the ranks; return its descriptor and PHALANX_STORE."""
        return create_agent_file(*self._store_location)

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool, is_relayed: bool = False) -> None:
        wanted = frozenset(ranks)
        for node in self._peers.present:
            theirs = [rank for rank in node.place.ranks if rank in wanted]
            if theirs:
                self._put(node, "signal", signum=signum, ranks=theirs, group=group, is_relayed=is_relayed)

    def intercept_signal(self, signum: int) -> bool:
        """Process a signal at this host if it ends only this host's part of the job; return whether it does."""
        return signum == signal.SIGTERM and self._succession.departure.request(self._attempt)

    @property
    def is_leaving(self) -> bool:
        """Return whether this host is leaving, and the job continues without its ranks."""
        return self._succession.departure.is_leaving

    def remind(self, rank: int, message: dict[str, Any]) -> None:
        """Resend the order to leave to a rank of this host that was not connected before."""
        if message.get("kind") in ("elastic", "waiting"):
            self._attempt.links.send(rank, LEAVE)

    @property
    def has_left(self) -> bool:
        """Return whether this host has left the job, which another host now leads."""
        return self._succession.departure.has_left

    def sweep(self) -> None:
        if self.has_left:
            return
        if self._sweep_limit is None:
            self._sweep_limit = time.monotonic() + HOST_SWEEP_S
        self._put_all("sweep")

    @property
    def is_swept(self) -> bool:
        """Return whether every process of the job on the other remaining hosts has exited."""
        return self.has_left or all(node.facts.member in self._swept_hosts for node in self._peers.present)

    def request_stacks(self, request: ClientRequest) -> None:
        """Request the other hosts' stacks, or their state for `phalanx top`; answer when all have arrived."""
        self._stacks_requests.send(request)

    def close(self) -> None:
        """Close the requests that still wait for other hosts' stacks."""
        self._stacks_requests.close()

    @property
    def guard(self) -> LeadGuard:
        """Return the guard, for the next attempt."""
        return self._succession.guard

    @property
    def peers(self) -> PeerHosts:
        """Return the other hosts, for the next attempt."""
        return self._peers

    def merge_logs(self, logs: list[GroupLog]) -> list[GroupLog]:
        return self._records.merge_logs(logs)

    @property
    def ended_ns(self) -> dict[int, int]:
        return self._records.ended_ns

    def name_host(self, rank: int) -> str:
        node = find_node(self._peers.nodes, [rank])
        return node.where if node is not None else super().name_host(rank)

    def _put(self, node: Node, kind: str, **body: Any) -> None:
        self._peers.channel.put(node.facts.member, kind, attempt=self._number, **body)

    def _put_all(self, kind: str, **body: Any) -> None:
        members = [node.facts.member for node in self._peers.present]
        self._peers.channel.put_many(members, kind, attempt=self._number, **body)

    def _read(self, message: ControlMessage | Change) -> None:
        """Process a message from another host; ignore invalid messages."""
        if isinstance(message, Change):
            self._process_change(message)
        elif self._succession.process(message):
            pass
        elif message.member in self._peers.others and message.body.get("attempt") == self._number:
            with contextlib.suppress(*MALFORMED):
                self._process(message, self._peers.others[message.member])

    def _process_change(self, change: Change) -> None:
        if change.kind in ("left", "lost"):
            self._late.on_gone(change)
            self.lose(change.member, change.why)
        elif change.kind == "joined":
            candidate = self._late.on_joined(change)
            if candidate is None:
                return
            if self._attempt.state.phase == "running":
                self._attempt.do_elastic(self._elastic.on_host_joined(candidate, time.monotonic()))
            is_spare = self._attempt.state.phase == "running" and self._elastic.active
            self._late.notify(change.member, is_spare=is_spare)
            self._succession.on_host_joined(change.member)
        elif change.kind in ("expelled", "unreachable"):  # about this host itself: the coordinator's thread has ended
            for member in list(self._peers.others):
                self.lose(member, f"the coordinator on this host has failed: {change.why}")

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Start the succession and notify waiting hosts again, once a rank has reported that the job is elastic."""
        if message.get("kind") == "elastic" and self._elastic.active:  # hosts may have joined before that
            self._succession.on_elastic_rank()
            self._late.notify_again(is_spare=self._attempt.state.phase == "running")

    def _process(self, message: ControlMessage, node: Node) -> None:
        body = message.body
        if self._remote_ranks.process(message, node, self._attempt):
            return
        if message.kind == "signal":
            signum = int(body["signum"])
            if signum not in ENDING_SIGNALS:  # other signals concern only the ranks of that host
                raise ValueError(f"signal {signum} does not end a job")
            if signum != signal.SIGTERM or not (self._succession.departure.note_signal(node) or self._release(node)):
                self._attempt.on_signal(signum, f" on {node.label}")
        elif message.kind == "print":
            self._host.display.print(f"{printable_lines(str(body['text']))}   (on {node.label})")
        elif message.kind in _RECORD_KINDS:
            self._records.add(message, self._peers.channel.to_own_clock(message.member, 0.0), self._attempt)
        elif message.kind == "swept":
            self._swept_hosts.add(message.member)
        elif message.kind == "stacks":
            self._stacks_requests.add_answer(int(body["request"]), message.member, str(body["text"]))
        elif message.kind == "failed":
            self.lose(message.member, printable(str(body["why"])))

    def _release(self, node: Node) -> bool:
        """Release a host if the others can continue without it; return whether they can.

        The ranks of a released host finish their step and exit.
        """
        if self._attempt.state.phase != "running":
            return False
        self._attempt.receive_from_ranks()
        actions = self._elastic.on_host_leaves(node.facts.member, node.where, time.monotonic())
        if actions is None:
            return False
        self._put(node, "leave")
        self._peers.lose(node.facts.member, "it has left")
        self._attempt.do_elastic(actions)
        return True

    def lose(self, member: int, why: str) -> None:
        """Continue without a host, at once or as soon as a majority of the hosts agrees."""
        self._succession.remove(member, why)

    def _remove(self, member: int, why: str) -> None:
        self._attempt.receive_from_ranks()  # first, as in on_exit
        node = self._peers.lose(member, why)
        now = time.monotonic()
        if node is None:
            self._attempt.do_elastic(self._elastic.on_host_lost(member, "", why, now) or [])  # it may have been waiting
            return
        slots = list(node.place.ranks)
        for slot in slots:
            self._host.display.end(slot)
        if self._elastic.is_arriving(slots[0]):
            self._host.display.print(f"phalanx run: {node.where}, which was about to join, is lost: {why}")
            self._attempt.do_elastic(self._elastic.on_host_lost(member, node.where, why, now) or [])
            return
        occupied = frozenset(self._elastic.generation.slots)
        gone = [self._elastic.rank_of(slot) for slot in slots if slot in occupied]
        survived = None
        if self._attempt.state.phase == "running":
            survived = self._elastic.on_host_lost(member, node.where, why, now)
        actions: list[Action] = []
        if survived is None:
            loss = HostLoss(node.where, why, now - self._peers.host_timeout_s)
            actions = self._attempt.state.on_host_lost(slots, loss, now)
        else:
            for slot in slots:
                self._attempt.state.on_retired(slot)
        if self._attempt.state.interrupted is None or self._attempt.state.phase == "running":
            self._host.display.print(f"phalanx run: {node.where}, with {name_ranks(slots)}, is lost: {why}")
        if self._attempt.numbers.store is not None:
            report_lost(self._attempt.numbers.store, LostHost(tuple(gone), describe_loss(node.where, why)))
        self._put_all("host lost", host=node.where, ranks=slots, gone=gone, why=why)
        self._attempt.do(actions)
        self._attempt.do_elastic(survived or [])

    def begin(self) -> None:
        """Make the display expect lines of the ranks of all hosts."""
        for node in self._peers.nodes:
            self._host.display.begin(node.place.ranks)


_RECORD_KINDS = ("flight", "rank file", "report host")  # the kinds of messages that `HostRecords.add` accepts


class HostRecords:
    """`HostRecords` are other hosts' flight records and report files of one attempt; times are on this host's clock."""

    def __init__(self) -> None:
        self._logs: list[GroupLog] = []
        self.ended_ns: dict[int, int] = {}  # when processes ended, by pid

    def add(self, message: ControlMessage, offset_s: float, attempt: Attempt) -> None:
        """Store a message of a host whose clock was zero when this host's clock was `offset_s`.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        body: Mapping[str, Any] = message.body
        if message.kind == "flight":
            logs, ended_ns = logs_from_json(body["groups"], body["ended_ns"], int(offset_s * 1e9))
            self._logs += logs
            self.ended_ns.update(ended_ns)
        elif message.kind == "report host":
            attempt.report_hosts[str(body["host"])] = (offset_s, float(body["copy_bytes_per_s"]))
        elif attempt.report_folder:
            from phalanx._job.report.transfer import unpack_file  # here, because most jobs write no report

            with contextlib.suppress(OSError):  # the report of that host is incomplete
                unpack_file(attempt.report_folder, str(body["name"]), str(body["text"]))

    def merge_logs(self, logs: list[GroupLog]) -> list[GroupLog]:
        """Return `logs` with the records of other hosts' ranks, group by group."""
        return merge_logs([*logs, *self._logs])


class WaitingHosts:
    """`WaitingHosts` handles the hosts that wait to join, which are in `PeerHosts.late`."""

    def __init__(self, peers: PeerHosts, display: Display) -> None:
        self._peers = peers
        self._display = display

    def on_joined(self, change: Change) -> ArrivedHost | None:
        """Return a host that has joined; None if it cannot be in this job (print why) or the member is not an agent."""
        problem = describe_unfit(change.facts) or describe_second_job(change.facts)
        facts = None if problem else HostFacts.from_json(change.member, change.facts)
        if facts is None:
            if problem:
                self._display.print(f"phalanx run: {problem}")
            return None
        if conflict := find_conflict([self._peers.own.facts, facts], self._peers.limits.max_hosts):
            self._peers.reject(change.member, conflict)
            self._display.print(f"phalanx run: {conflict}. The job continues without that host")
            return None
        self._peers.late[change.member] = change
        return ArrivedHost(change.member, facts.num_ranks, facts.known_as, facts.role)

    def on_gone(self, change: Change) -> None:
        """Forget a waiting host that has left or is lost."""
        waited = self._peers.late.pop(change.member, None)
        if waited is not None and change.kind == "lost":
            facts = HostFacts.from_json(change.member, waited.facts)
            where = "a host" if facts is None else f"{facts.name} ({facts.address})"
            self._display.print(f"phalanx run: {where}, which waited to join, is lost: {change.why}")

    def notify(self, member: int, *, is_spare: bool) -> None:
        """Notify a waiting host of what it waits for: to replace a lost host, or the job's next start."""
        if member not in self._peers.late:
            return
        if is_spare:
            self._peers.spares.add(member)
        self._peers.channel.put(member, "late", spare=is_spare)

    def notify_again(self, *, is_spare: bool) -> None:
        """Notify the hosts that joined before the job was known to be elastic of what they wait for now."""
        for member in set(self._peers.late) - self._peers.spares:
            self.notify(member, is_spare=is_spare)


_RANK_KINDS = ("started", "abandoned", "exit", "rank message", "report")


class RemoteRanks:
    """`RemoteRanks` processes the other hosts' messages about their ranks during one attempt."""

    def __init__(self, peers: PeerHosts, elastic: ElasticHosts, display: Display) -> None:
        self._peers = peers
        self._elastic = elastic
        self._display = display

    def process(self, message: ControlMessage, node: Node, attempt: Attempt) -> bool:
        """Process a message if it is about ranks of `node`; return whether it is.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        body = message.body
        if message.kind == "lines":
            self._show(body["items"], node)
        elif message.kind in _RANK_KINDS and message.member in self._peers.lost:
            pass  # another host may have the lost host's slots by now, and even the same pids
        elif message.kind == "started":
            attempt.on_started(_rank_of(body, node), int(body["pid"]))
        elif message.kind == "abandoned":
            attempt.state.on_abandoned(_rank_of(body, node))
        elif message.kind == "exit":
            at = self._peers.channel.to_own_clock(message.member, float(body["at"]))
            rank, pid = _rank_of(body, node), int(body["pid"])
            # A host that was abandoned and has rejoined may still report processes of its earlier membership.
            is_known = self._elastic.pid_of(rank) == pid
            if is_known and (attempt.state.phase == "running" or not self._elastic.is_arriving(rank)):
                attempt.on_exit(Exit(rank, pid, int(body["status"]), at, str(body["dump"])))
        elif message.kind == "rank message":
            attempt.on_rank_message(_rank_of(body, node), int(body["pid"]), dict(body["message"]))
        elif message.kind == "report":
            self._process_report(message, node, attempt)
        else:
            return False
        return True

    def _show(self, items: list[Any], node: Node) -> None:
        for rank, stream, lines, status, ended in items:
            if rank in node.place.ranks and stream in (1, 2):
                self._display.show(rank, stream, decode_lines(lines), decode_lines([status])[0])
                if ended:
                    self._display.end(rank)

    def _process_report(self, message: ControlMessage, node: Node, attempt: Attempt) -> None:
        fields = message.body["report"]
        fields["at"] = self._peers.channel.to_own_clock(message.member, float(fields["at"]))
        report = ExceptionReport.from_bytes(json.dumps(fields).encode())
        if report is not None and self._elastic.pid_of(_rank_of(fields, node)) == report.pid:
            attempt.on_report(report)


def _rank_of(body: dict[str, Any], node: Node) -> int:
    rank = int(body["rank"])
    if rank not in node.place.ranks:
        raise ValueError(f"rank {rank} is not on {node.label}")
    return rank


_LIMIT_S = 6.0  # much longer than a host waits for its ranks, which is a second


@dataclass
class _Pending:
    """A `_Pending` is a request with the hosts that have not answered yet, and the answers of the others."""

    request: ClientRequest
    waiting: set[int]
    due: float
    answers: dict[int, str] = field(default_factory=dict)


class StacksRequests:
    """`StacksRequests` has one attempt's pending requests for all hosts' stacks, or for the data of `phalanx top`."""

    def __init__(self, peers: PeerHosts, attempt: int) -> None:
        self._peers, self._attempt = peers, attempt
        self._pending: dict[int, _Pending] = {}
        self._num_requests = 0

    @property
    def due(self) -> float | None:
        """Return when to call `answer` even if no host has answered."""
        return min((pending.due for pending in self._pending.values()), default=None)

    def send(self, request: ClientRequest) -> None:
        """Send a request to the agents of the other hosts, and answer it when they have answered."""
        self._num_requests += 1
        waiting = {node.facts.member for node in self._peers.present}
        self._pending[self._num_requests] = _Pending(request, waiting, time.monotonic() + _LIMIT_S)
        what = request.message.get("what", "stacks")
        self._peers.channel.put_many(waiting, "stacks", attempt=self._attempt, request=self._num_requests, what=what)
        self.answer()

    def add_answer(self, number: int, member: int, text: str) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            pending.waiting.discard(member)
            pending.answers[member] = text

    def answer(self) -> None:
        """Answer the requests for which all hosts have answered, or time is up."""
        channel = self._peers.channel
        for number, pending in list(self._pending.items()):
            if pending.waiting and time.monotonic() < pending.due:
                continue
            silent = [
                HostAnswer(self._peers.others[member].where, "does not answer", 0.0) for member in pending.waiting
            ]
            answers = [
                HostAnswer(node.where, pending.answers[m], channel.to_own_clock(m, 0.0))
                for m, node in self._peers.others.items()
                if m in pending.answers
            ]
            answer_others(pending.request.channel, [*answers, *silent])
            pending.request.close()
            del self._pending[number]

    def close(self) -> None:
        """Close the pending requests without an answer."""
        for pending in self._pending.values():
            pending.request.close()
        self._pending.clear()
