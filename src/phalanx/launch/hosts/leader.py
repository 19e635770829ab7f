"""The first host while ranks run: it decides for all of them, shows what all print, and has the last word."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.coordination.agent_file import LostHost, create_agent_file, describe_loss, tell_lost
from phalanx.diagnostics.observer import GroupLog
from phalanx.diagnostics.rank_list import name_ranks
from phalanx.launch.agent.agent_socket import Request
from phalanx.launch.agent.attempt import Attempt, Host
from phalanx.launch.agent.supervision import Action
from phalanx.launch.failure import Exit, Loss, Report
from phalanx.launch.hosts.flights import logs_from_json, merge_logs
from phalanx.launch.hosts.mail import Letter, Mail, decode_lines
from phalanx.launch.hosts.roster import HostFacts, Node, describe_unfit, find_node
from phalanx.launch.plan import JobPlan
from phalanx.launch.stacks.job_snapshot import answer_others

_LOOK_LIMIT_S = 6.0  # a rank that cannot answer is given up after a second
_SWEEP_LIMIT_S = 15.0  # what a host may take to kill and tell, which is otherwise alive


class Team:
    """The other hosts of one attempt, by member."""

    def __init__(self, mail: Mail, nodes: list[Node], own: Node, host_timeout_s: float) -> None:
        self.mail = mail
        self.nodes = nodes
        self.own = own
        self.host_timeout_s = host_timeout_s
        self.others = {node.facts.member: node for node in nodes if node is not own}
        self.lost: dict[int, str] = {}  # member -> why
        self.late: list[Letter] = []  # of hosts that have joined since

    @property
    def present(self) -> list[Node]:
        """The other hosts that are still there."""
        return [node for member, node in self.others.items() if member not in self.lost]

    def name_host(self, ranks: Iterable[int]) -> str:
        """What people call the host of these ranks; empty where they are on several."""
        node = find_node(self.nodes, ranks)
        return node.label if node is not None else ""

    def lose(self, member: int, why: str) -> Node | None:
        """A host has gone; None if it was none of this attempt, or is known to have."""
        node = self.others.get(member)
        if node is None or member in self.lost:
            return None
        self.lost[member] = why
        return node


@dataclass
class Look:
    """Somebody who wants to know where the ranks of other hosts are: which hosts have yet to say, what others said."""

    request: Request
    waiting: set[int]
    due: float
    told: dict[int, str] = field(default_factory=dict)


class LeaderAttempt(Attempt):
    """An attempt whose other ranks are on other hosts."""

    def __init__(self, plan: JobPlan, host: Host, restart_count: int, team: Team, store: tuple[str, str]) -> None:
        self._team = team
        self._meeting_place = store
        self._number = restart_count
        self._swept_hosts: set[int] = set()
        self._sweep_limit: float | None = None
        self._remote_logs: list[GroupLog] = []
        self._remote_ended_ns: dict[int, int] = {}
        self._looks: dict[int, Look] = {}
        self._number_of_looks = 0
        super().__init__(plan, host, restart_count, team.own.place)
        host.display.host_of = team.name_host

    @property
    def fds(self) -> tuple[int, ...]:
        """What else to wait on."""
        # A reader who holds up our output holds up the hosts' lines, too; but not their ends.
        mail = self._team.mail
        held_up = self._host.display.full and self.state.phase == "running"
        return (mail.notices.fileno(),) if held_up else (mail.fileno(), mail.notices.fileno())

    @property
    def due(self) -> float | None:
        """When to look again although nothing has come."""
        times = [at for at in (self._sweep_limit, *(look.due for look in self._looks.values())) if at is not None]
        return min(times, default=None)

    def receive(self, ready: set[int]) -> None:
        """Read what the other hosts say."""
        for line in self._team.mail.notices.take() if self._team.mail.notices.fileno() in ready else ():
            self._host.display.say(f"phalanx run: {line}")
        if self._team.mail.fileno() in ready:
            for letter in self._team.mail.take():
                self._read(letter)
        self._answer_looks()
        if self._sweep_limit is not None and time.monotonic() >= self._sweep_limit:
            self._sweep_limit = None
            for node in self._team.present:
                if node.facts.member not in self._swept_hosts:
                    self._lose(
                        node.facts.member, f"it was told to end its ranks, and did not within {_SWEEP_LIMIT_S:g} s"
                    )

    def create_store(self) -> tuple[int | None, str]:
        """The coordinator, by the way that leads there from this host."""
        return create_agent_file(*self._meeting_place)

    def send_signal(self, signum: int, ranks: tuple[int, ...], *, group: bool) -> None:
        """As on one host, and to the ranks of the others."""
        super().send_signal(signum, ranks, group=group)
        for node in self._team.present:
            theirs = [rank for rank in ranks if rank in node.place.ranks]
            if theirs:
                self._put(node, "signal", signum=signum, ranks=theirs, group=group)

    def sweep_others(self) -> None:
        """Have every process of the job on the other hosts killed."""
        if self._sweep_limit is None:
            self._sweep_limit = time.monotonic() + _SWEEP_LIMIT_S
        for node in self._team.present:
            self._put(node, "sweep")

    @property
    def is_swept(self) -> bool:
        """Whether no process of the job is left, on any host that is still there."""
        return super().is_swept and all(node.facts.member in self._swept_hosts for node in self._team.present)

    def look_at_others(self, request: Request) -> None:
        """Ask the agents of the other hosts, and answer when they have."""
        self._number_of_looks += 1
        waiting = {node.facts.member for node in self._team.present}
        self._looks[self._number_of_looks] = Look(request, waiting, time.monotonic() + _LOOK_LIMIT_S)
        for node in self._team.present:
            self._put(node, "stacks", look=self._number_of_looks)
        self._answer_looks()

    def _answer_looks(self) -> None:
        for number, look in list(self._looks.items()):
            if look.waiting and time.monotonic() < look.due:
                continue
            silent = [(self._team.others[member].where, "does not answer") for member in look.waiting]
            told = [(node.where, look.told[m]) for m, node in self._team.others.items() if m in look.told]
            answer_others(look.request.sock, [*told, *silent])
            look.request.close()
            del self._looks[number]

    def close(self) -> None:
        """Let go of what the ranks have shown us, and of those who wait to be told where they are."""
        for look in self._looks.values():
            look.request.close()
        self._looks.clear()
        super().close()

    def collect_logs(self) -> list[GroupLog]:
        """What the ranks of all hosts have recorded, group by group."""
        return merge_logs([*super().collect_logs(), *self._remote_logs])

    @property
    def ended_ns(self) -> dict[int, int]:
        """Of the ranks of all hosts."""
        return {**super().ended_ns, **self._remote_ended_ns}

    def name_host(self, rank: int) -> str:
        """Its name and address."""
        node = find_node(self._team.nodes, [rank])
        return node.where if node is not None else super().name_host(rank)

    def _put(self, node: Node, kind: str, **body: Any) -> None:
        self._team.mail.put(node.facts.member, kind, attempt=self._number, **body)

    def _read(self, letter: Letter) -> None:
        """Follow a message of another host; what makes no sense is as if it had not come."""
        if letter.kind in ("left", "lost"):
            self._lose(letter.member, letter.body["why"])
        elif letter.kind == "joined" and (unfit := describe_unfit(letter.body)):
            self._host.display.say(f"phalanx run: {unfit}")
        elif letter.kind == "joined" and HostFacts.from_json(letter.member, letter.body) is not None:
            self._team.late.append(letter)
            self._team.mail.put(letter.member, "late")
        elif letter.kind in ("expelled", "unreachable"):  # of ourselves: the coordinator's thread has ended
            for member in list(self._team.others):
                self._lose(member, f"the coordinator on this host has failed: {letter.body['why']}")
        elif letter.member in self._team.others and letter.body.get("attempt") == self._number:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._follow(letter, self._team.others[letter.member])

    def _follow(self, letter: Letter, node: Node) -> None:
        body = letter.body
        if letter.kind == "lines":
            self._show(body["items"], node)
        elif letter.kind == "started":
            self.state.on_started(_rank_of(body, node))
        elif letter.kind == "abandoned":
            self.state.on_abandoned(_rank_of(body, node))
        elif letter.kind == "exit":
            at = self._team.mail.to_own_clock(letter.member, float(body["at"]))
            rank, pid = _rank_of(body, node), int(body["pid"])
            self.do(self.state.on_exit(Exit(rank, pid, int(body["status"]), at, str(body["dump"]))))
        elif letter.kind == "report":
            self._hear_report(letter, node)
        elif letter.kind == "signal":
            self.on_signal(int(body["signum"]), f" on {node.label}")
        elif letter.kind == "say":
            self._host.display.say(f"{body['text']}   (on {node.label})")
        elif letter.kind == "flight":
            offset_ns = int(self._team.mail.to_own_clock(letter.member, 0.0) * 1e9)
            logs, ended_ns = logs_from_json(body["groups"], body["ended_ns"], offset_ns)
            self._remote_logs += logs
            self._remote_ended_ns.update(ended_ns)
        elif letter.kind == "swept":
            self._swept_hosts.add(letter.member)
        elif letter.kind == "stacks":
            look = self._looks.get(int(body["look"]))
            if look is not None:
                look.waiting.discard(letter.member)
                look.told[letter.member] = str(body["text"])
        elif letter.kind == "failed":
            self._lose(letter.member, str(body["why"]))

    def _show(self, items: list[Any], node: Node) -> None:
        for rank, stream, lines, status, ended in items:
            if rank in node.place.ranks and stream in (1, 2):
                self._host.display.show(rank, stream, decode_lines(lines), decode_lines([status])[0])
                if ended:
                    self._host.display.end(rank)

    def _hear_report(self, letter: Letter, node: Node) -> None:
        fields = letter.body["report"]
        fields["at"] = self._team.mail.to_own_clock(letter.member, float(fields["at"]))
        report = Report.from_bytes(json.dumps(fields).encode())
        if report is not None and report.rank in node.place.ranks:
            if report.traceback and self.state.phase in ("running", "settling"):
                self._host.display.expect(report.rank, report.traceback)
            self.do(self.state.on_report(report, time.monotonic()))

    def _lose(self, member: int, why: str) -> None:
        node = self._team.lose(member, why)
        if node is None:
            return
        ranks = list(node.place.ranks)
        now = time.monotonic()
        for rank in ranks:
            self._host.display.end(rank)
        actions: list[Action] = self.state.on_host_lost(
            ranks, Loss(node.where, why, now - self._team.host_timeout_s), now
        )
        if self.state.interrupted is None or self.state.phase == "running":
            self._host.display.say(f"phalanx run: {node.where}, with {name_ranks(ranks)}, is lost: {why}")
        if self._store is not None:
            tell_lost(self._store, LostHost(tuple(ranks), describe_loss(node.where, why)))
        for other in self._team.present:
            self._put(other, "host lost", host=node.where, ranks=ranks, why=why)
        self.do(actions)

    def run(self) -> None:
        """As on one host; returns when this one is done."""
        for node in self._team.nodes:
            self._host.display.begin(node.place.ranks)
        super().run()


def tell_start(team: Team, restart_count: int, run_id: str, master: tuple[str, int]) -> None:
    """Have every other host start its ranks."""
    for node in team.others.values():
        team.mail.put(
            node.facts.member,
            "start",
            attempt=restart_count,
            place=asdict(node.place),
            run_id=run_id,
            master=list(master),
            first_host=team.own.where,
        )


def _rank_of(body: dict[str, Any], node: Node) -> int:
    rank = int(body["rank"])
    if rank not in node.place.ranks:
        raise ValueError(f"rank {rank} is not on {node.label}")
    return rank
