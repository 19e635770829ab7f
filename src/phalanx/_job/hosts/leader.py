"""The first host, while ranks run, decides for all of them, shows what all print, and has the last word."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace
from typing import Any

from phalanx._base.loss_detection import HOST_SWEEP_S
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.control.wire import MALFORMED
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._comm.diagnostics.printable import printable, printable_lines
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.rendezvous.agent_file import LostHost, create_agent_file, describe_loss, tell_lost
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic_actions import BeginGeneration, DropHost, PrepareHost
from phalanx._job.agent.failure import HostLoss
from phalanx._job.agent.generation import HostSeats
from phalanx._job.agent.host_link import HostLink
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.supervision import Action
from phalanx._job.hosts.control_channel import Change, ControlMessage
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.generation_message import generation_to_json
from phalanx._job.hosts.host_records import KINDS as RECORD_KINDS
from phalanx._job.hosts.host_records import HostRecords
from phalanx._job.hosts.late_hosts import LateHosts
from phalanx._job.hosts.leader_state import KEY as LEADER_STATE
from phalanx._job.hosts.leader_state import LeaderState
from phalanx._job.hosts.node_plan import Node, find_node
from phalanx._job.hosts.peer_hosts import PeerHosts, tell_start
from phalanx._job.hosts.remote_ranks import RemoteRanks
from phalanx._job.hosts.stacks_requests import StacksRequests
from phalanx._job.hosts.succession.departure import LEAVE, Departure
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.inspect.agent_socket import Request
from phalanx._job.output.line_prefix import find_template

_RECORD_S = 0.2  # ranks that start or end within this time are recorded together


class LeaderLink(HostLink):
    """The first host's link: what all hosts tell is followed here, and what was decided they are told."""

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
        """Make the link of an attempt.

        Arguments:
            store: the coordinator's address on this host, the job's key, and the path of a relay if there is one.
            guard: sees to it that another host could lead; without one the job ends with this host.
            elastic, begun: of a host that has taken over, what it goes on from, and the generation that was begun last.
        """
        super().__init__(plan, peers.own.place, peers.own.facts.member)
        self._host = host
        self._peers = peers
        self._store_location = store
        self._number = restart_count
        self._attempt: Attempt
        self._elastic = elastic or peers.plan_elastic(plan.settings.max_restarts, restart_count)
        self._guard = guard or LeadGuard(peers.channel, None)
        self._begun = begun  # the newest generation but the first
        self._num_ended = 0  # so many ranks that have ended are recorded
        self._record_at: float | None = None  # when what has changed since is recorded
        self._is_recorded = False
        self._swept_hosts: set[int] = set()
        self._told_to_start = set(peers.others)
        self._late = LateHosts(peers, host.display)
        self._sweep_limit: float | None = None
        self._records = HostRecords()
        self._stacks_requests = StacksRequests(peers, restart_count)
        self._remote_ranks = RemoteRanks(peers, self._elastic, host.display)
        self._departure = Departure(peers, self._elastic, self._guard, host.display, self._let_go)

    def attach(self, attempt: Attempt) -> None:
        """Learn whose link this is, and have its display name the hosts of all ranks."""
        self._attempt = attempt
        self._host.display.host_of = self._peers.name_host
        if template := find_template(self._plan.settings.log_line_prefix_template, self._plan.environ):
            self._host.display.prefix_of = lambda rank: self._peers.fill_prefix(template, rank)

    def make_elastic(self) -> ElasticHosts:
        """Return who decides what becomes of the job when ranks or hosts are lost."""
        return self._elastic

    def send_to_rank(self, rank: int, message: dict[str, Any]) -> bool:
        return self._put_to_host_of(rank, "to rank", message=message)

    def tell_generation(self, rank: int) -> bool:
        return self._put_to_host_of(rank, "tell generation")

    def _put_to_host_of(self, rank: int, kind: str, **body: Any) -> bool:
        node = self._peers.find_other(rank)
        if node is not None:
            self._put(node, kind, rank=rank, **body)
        return node is not None

    def begin_generation(self, begun: BeginGeneration) -> None:
        """Tell every other host to do its part of a generation, or to start, if it has none yet."""
        self._guard.begin(len(self._elastic.seating.hosts))
        state, seats = self._attempt.state, begun.generation.seats
        state.world_size = max(state.world_size, max(seats) + 1)
        for seat in range(state.world_size):
            if seat in seats:
                state.retired.discard(seat)
            elif seat not in state.exits:
                state.on_retired(seat)
        for host in self._elastic.seating.hosts:
            if host.member not in self._peers.others and host.member != self.member:
                self._admit_host(host, begun)
        self._record(begun)  # with the hosts that have just come, before any of them is told
        for node in self._peers.present:
            part = begun.generation.part_of(node.facts.member)
            for seat in () if part is None else part.forked:
                state.on_replaced(seat)
            if node.facts.member in self._told_to_start:
                self._put(node, "generation", begun=generation_to_json(begun))
            else:
                self._start(node, begun)
        self._guard.want(self._voters)

    @property
    def _voters(self) -> list[int]:
        return self._peers.find_voters(self._elastic.seating, self._attempt.state.exits)

    def _record(self, begun: BeginGeneration | None) -> None:
        """Leave what was decided in the store, for a host that takes over."""
        self._begun = begun or self._begun
        if not self._guard.is_begun:
            return
        exits = self._attempt.state.exits.values()
        state = LeaderState.of(self._number, self._plan, self._peers, self._elastic, self._begun, exits)
        self._peers.channel.put_key(LEADER_STATE, state.to_bytes())

    def do(self, action: PrepareHost | DropHost) -> None:
        if isinstance(action, DropHost):
            self._drop(action)
            return
        node = self._admit_host(action.seats, action.begun)
        if node is not None:
            self._start(node, action.begun)

    def on_given_up(self) -> None:
        """Fail the job by the hosts that it has lost, of which nothing was decided yet."""
        state, gone = self._attempt.state, self._elastic.gone
        for member, why in self._peers.lost.items():
            node = self._peers.others[member]
            ranks = [rank for rank in node.place.ranks if rank in gone]
            if ranks:
                state.retired.difference_update(ranks)
                now = time.monotonic()
                loss = HostLoss(node.where, why, now - self._peers.host_timeout_s)
                self._attempt.do(state.on_host_lost(ranks, loss, now))

    def _admit_host(self, seats: HostSeats, begun: BeginGeneration) -> Node | None:
        """Take a host that has come as one of ours."""
        part = begun.generation.part_of(seats.member)
        if part is None:
            return None
        place = replace(part.place, first_rank=seats.first_seat, num_ranks=seats.num_seats)
        node = self._peers.take_in(seats, place)
        if node is not None:
            self._host.display.begin(place.ranks)
        return node

    def _start(self, node: Node, begun: BeginGeneration) -> None:
        self._told_to_start.add(node.facts.member)
        master = (self._plan.master_addr, self._plan.master_port)
        tell_start(self._peers, node, self._number, self._plan.run_id, self._plan.run, master, begun)

    def _drop(self, dropped: DropHost) -> None:
        node = self._peers.lose(dropped.member, dropped.why)
        if node is not None:
            for rank in node.place.ranks:
                self._host.display.end(rank)
            self._host.display.say(f"phalanx run: {node.where} is not taken in: {dropped.why}")
            why = f"phalanx run: this host is not taken in: {dropped.why}"
            self._peers.channel.put(dropped.member, "end", code=1, why=why)

    @property
    def fds(self) -> tuple[int, ...]:
        """Return more descriptors that are readable when `receive` has something to do."""
        # A reader who holds up our output holds up the hosts' lines, too; but not their ends.
        channel = self._peers.channel
        held_up = self._host.display.full and self._attempt.state.phase == "running"
        notices = (channel.notices.fileno(), *self._guard.fds)
        return notices if held_up else (channel.fileno(), *notices)

    @property
    def due(self) -> float | None:
        """Return when to look again although nothing has come."""
        more = time.monotonic() if self._peers.channel.has_more else None
        dues = (self._stacks_requests.due, self._guard.due, self._departure.due, self._record_at)
        return min((at for at in (self._sweep_limit, *dues, more) if at is not None), default=None)

    def receive(self, ready: set[int]) -> None:
        """Read what the other hosts say."""
        lines = self._peers.channel.notices.take() if self._peers.channel.notices.fileno() in ready else []
        if self._peers.channel.fileno() in ready or self._peers.channel.has_more:
            for message in self._peers.channel.take():
                self._read(message)
        for line in (*lines, *self._guard.receive()):
            self._host.display.say(f"phalanx run: {line}")
        self._say_standbys()
        for member, why in self._guard.take_agreed():
            self._lose_now(member, why)
        num_ended, now = len(self._attempt.state.exits), time.monotonic()
        if self._elastic.finished and self._num_ended != num_ended:
            self._record_at, self._num_ended = self._record_at or now + _RECORD_S, num_ended
        if self._record_at is not None and now >= self._record_at:
            self._record_at = None
            self._record(None)
            self._guard.want_again(*self._peers.plan_vote(self._elastic, self._attempt.state.exits))
        self._departure.go_on(self._attempt)
        self._stacks_requests.answer()
        if self._sweep_limit is not None and time.monotonic() >= self._sweep_limit:
            self._sweep_limit = None
            for node in self._peers.present:
                if node.facts.member not in self._swept_hosts:
                    self.lose(node.facts.member, f"it was told to end its ranks, and did not within {HOST_SWEEP_S:g} s")
                    self._peers.channel.expel(node.facts.member)  # so that it hears that nobody counts on it

    def _say_standbys(self) -> None:
        standbys = self._guard.take_standbys()
        if standbys:
            names = " or ".join(self._peers.others[member].where for member in standbys)
            self._host.display.say(f"phalanx run: without this host, {names} would lead the job")
            for member in {*self._peers.late, *self._elastic.arrivals}:  # those that have no vote
                self._peers.channel.put(member, "standbys", addresses=self._guard.polling_places)

    def create_store(self) -> tuple[int | None, str]:
        """Return the coordinator, by the way that leads there from this host."""
        return create_agent_file(*self._store_location)

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool, is_relayed: bool = False) -> None:
        wanted = frozenset(ranks)
        for node in self._peers.present:
            theirs = [rank for rank in node.place.ranks if rank in wanted]
            if theirs:
                self._put(node, "signal", signum=signum, ranks=theirs, group=group, is_relayed=is_relayed)

    def take_signal(self, signum: int) -> bool:
        """Take a signal that has come at this host, if it asks this host to leave and not the job to end."""
        return signum == signal.SIGTERM and self._departure.ask(self._attempt)

    @property
    def is_leaving(self) -> bool:
        """Return whether the others go on without this process of a rank of this host, which leaves."""
        return self._departure.is_leaving

    def remind(self, rank: int, message: dict[str, Any]) -> None:
        """Tell a rank of this host again that it leaves: it was not there to be told."""
        if message.get("kind") in ("elastic", "waiting"):
            self._attempt.links.send(rank, LEAVE)

    @property
    def has_left(self) -> bool:
        """Return whether this host is in the job no more, and another one is to lead."""
        return self._departure.has_left

    def sweep(self) -> None:
        if self.has_left:
            return
        if self._sweep_limit is None:
            self._sweep_limit = time.monotonic() + HOST_SWEEP_S
        self._put_all("sweep")

    @property
    def is_swept(self) -> bool:
        """Return whether no process of the job is left on any other host that is still there."""
        return self.has_left or all(node.facts.member in self._swept_hosts for node in self._peers.present)

    def ask_for_stacks(self, request: Request) -> None:
        """Ask the agents of the other hosts, and answer when they have."""
        self._stacks_requests.ask(request)

    def close(self) -> None:
        """Let go of those who wait to be told where ranks are."""
        self._stacks_requests.close()

    @property
    def guard(self) -> LeadGuard:
        """Return what sees to it that another host could lead, for the next attempt."""
        return self._guard

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
        """Follow a message of another host; what makes no sense is as if it had not come."""
        if isinstance(message, Change):
            self._follow_change(message)
        elif message.kind in ("datagram", "stands by"):
            with contextlib.suppress(*MALFORMED):
                self._guard.hear(message)
        elif message.member in self._peers.others and message.body.get("attempt") == self._number:
            with contextlib.suppress(*MALFORMED):
                self._follow(message, self._peers.others[message.member])

    def _follow_change(self, change: Change) -> None:
        if change.kind in ("left", "lost"):
            self._late.on_gone(change)
            self.lose(change.member, change.why)
        elif change.kind == "joined":
            candidate = self._late.on_joined(change)
            if candidate is None:
                return
            if self._attempt.state.phase == "running":
                self._attempt.do_elastic(self._elastic.on_host_came(candidate, time.monotonic()))
            is_spare = self._attempt.state.phase == "running" and self._elastic.active
            self._late.tell(change.member, is_spare=is_spare)
            self._peers.channel.put(change.member, "standbys", addresses=self._guard.polling_places)
        elif change.kind in ("expelled", "unreachable"):  # it is about ourselves: the coordinator's thread has ended
            for member in list(self._peers.others):
                self.lose(member, f"the coordinator on this host has failed: {change.why}")

    def on_rank_message(self, rank: int, pid: int, message: dict[str, Any]) -> None:
        """Tell the hosts that wait what they wait for, once a rank has said that the job is elastic."""
        if message.get("kind") == "elastic" and self._elastic.active:  # hosts may have come before it was known
            if not self._is_recorded:
                self._is_recorded = True
                self._guard.want(self._voters)
                self._record(None)
            self._record_at = self._record_at or time.monotonic() + _RECORD_S  # whose process was not known before
            self._late.tell_again(is_spare=self._attempt.state.phase == "running")

    def _follow(self, message: ControlMessage, node: Node) -> None:
        body = message.body
        if self._remote_ranks.hear(message, node, self._attempt):
            return
        if message.kind == "signal":
            signum = int(body["signum"])
            if signum not in ENDING_SIGNALS:  # others are for the ranks of the host where they came
                raise ValueError(f"signal {signum} does not end a job")
            if signum != signal.SIGTERM or not (self._departure.hear(node) or self._let_go(node)):
                self._attempt.on_signal(signum, f" on {node.label}")
        elif message.kind == "say":
            self._host.display.say(f"{printable_lines(str(body['text']))}   (on {node.label})")
        elif message.kind in RECORD_KINDS:
            self._records.hear(message, self._peers.channel.to_own_clock(message.member, 0.0), self._attempt)
        elif message.kind == "swept":
            self._swept_hosts.add(message.member)
        elif message.kind == "stacks":
            self._stacks_requests.hear(int(body["request"]), message.member, str(body["text"]))
        elif message.kind == "failed":
            self.lose(message.member, printable(str(body["why"])))

    def _let_go(self, node: Node) -> bool:
        """Let a host leave, if the others go on without it: its ranks finish their step, and nobody waits for them."""
        if self._attempt.state.phase != "running":
            return False
        self._attempt.hear_ranks()
        actions = self._elastic.on_host_leaves(node.facts.member, node.where, time.monotonic())
        if actions is None:
            return False
        self._put(node, "leave")
        self._peers.lose(node.facts.member, "it has left")
        self._attempt.do_elastic(actions)
        return True

    def lose(self, member: int, why: str) -> None:
        """Go on without a host: at once if its ranks have all ended well, otherwise as soon as a majority agrees."""
        has_finished = self._peers.has_finished(member, self._attempt.state.exits)
        if has_finished or not self._guard.defer(member, why, self._voters):
            self._lose_now(member, why)
            self._guard.want_again(*self._peers.plan_vote(self._elastic, self._attempt.state.exits))

    def _lose_now(self, member: int, why: str) -> None:
        self._attempt.hear_ranks()  # this comes first, as in on_exit
        node = self._peers.lose(member, why)
        now = time.monotonic()
        if node is None:
            self._attempt.do_elastic(self._elastic.on_host_lost(member, "", why, now) or [])  # it may have been waiting
            return
        seats = list(node.place.ranks)
        for seat in seats:
            self._host.display.end(seat)
        if self._elastic.is_arriving(seats[0]):
            self._host.display.say(f"phalanx run: {node.where}, which was to be taken in, is lost: {why}")
            self._attempt.do_elastic(self._elastic.on_host_lost(member, node.where, why, now) or [])
            return
        occupied = frozenset(self._elastic.generation.seats)
        gone = [self._elastic.rank_of(seat) for seat in seats if seat in occupied]
        survived = None
        if self._attempt.state.phase == "running":
            survived = self._elastic.on_host_lost(member, node.where, why, now)
        actions: list[Action] = []
        if survived is None:
            loss = HostLoss(node.where, why, now - self._peers.host_timeout_s)
            actions = self._attempt.state.on_host_lost(seats, loss, now)
        else:
            for seat in seats:
                self._attempt.state.on_retired(seat)
        if self._attempt.state.interrupted is None or self._attempt.state.phase == "running":
            self._host.display.say(f"phalanx run: {node.where}, with {name_ranks(seats)}, is lost: {why}")
        if self._attempt.numbers.store is not None:
            tell_lost(self._attempt.numbers.store, LostHost(tuple(gone), describe_loss(node.where, why)))
        self._put_all("host lost", host=node.where, ranks=seats, gone=gone, why=why)
        self._attempt.do(actions)
        self._attempt.do_elastic(survived or [])

    def begin(self) -> None:
        """Have the display await lines of the ranks of all hosts."""
        for node in self._peers.nodes:
            self._host.display.begin(node.place.ranks)
