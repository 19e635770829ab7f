"""`LeaderState` has the decisions that the leader stores in the job's coordinator for a host that takes over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx._job.agent.elastic_actions import BeginGeneration, LostRank
from phalanx._job.agent.environment import Place
from phalanx._job.agent.failure import Exit
from phalanx._job.agent.generation import HostSlots, SlotPlan
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import HostFacts, Node
from phalanx._job.hosts.peer_hosts import PeerHosts

KEY = "launch/leader"


@dataclass(frozen=True)
class LeaderState:
    """A `LeaderState` has the hosts, their slots, and the newest generation (None: the first one)."""

    attempt: int
    run_id: str
    run: str
    job_begun: float
    nodes: tuple[Node, ...]
    slot_plan: SlotPlan
    begun: BeginGeneration | None
    num_replaced: int
    max_replacements: int | None
    losses: tuple[LostRank, ...]
    pids: dict[int, int]  # by slot
    exits: tuple[Exit, ...]  # the exits of the ranks that have succeeded

    @classmethod
    def of(
        cls,
        attempt: int,
        plan: JobPlan,
        peers: PeerHosts,
        elastic: ElasticHosts,
        begun: BeginGeneration | None,
        exits: Iterable[Exit],
    ) -> LeaderState:
        """Return the decisions of a leader, without hosts that are not accepted yet."""
        trained = {peers.own.facts.member, *(host.member for host in elastic.slot_plan.hosts)}
        return cls(
            attempt, plan.run_id, plan.run, plan.begun,
            tuple(node for node in peers.own_and_present if node.facts.member in trained), elastic.slot_plan, begun,
            elastic.num_replaced, elastic.max_replacements, tuple(elastic.losses),
            {slot: member.pid for slot, member in elastic.members.items()},
            tuple(exit for exit in exits if exit.status == 0),
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        fields = {
            "attempt": self.attempt,
            "run_id": self.run_id,
            "run": self.run,
            "job_begun": self.job_begun,
            "nodes": [[asdict(node.facts), asdict(node.place), node.label] for node in self.nodes],
            "hosts": [_slots_to_json(host) for host in self.slot_plan.hosts],
            "vacated": [_slots_to_json(host) for host in self.slot_plan.vacated],
            "begun": None if self.begun is None else self.begun.to_json(),
            "num_replaced": self.num_replaced,
            "max_replacements": self.max_replacements,
            "losses": [asdict(loss) for loss in self.losses],
            "pids": [list(each) for each in self.pids.items()],
            "exits": [[exit.rank, exit.pid, exit.at] for exit in self.exits],
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaderState:
        """Decode the result of `to_bytes`.

        Raises:
            KeyError, TypeError, ValueError: the data is invalid.
        """
        fields = json.loads(data)
        most = fields["max_replacements"]
        return cls(
            int(fields["attempt"]),
            str(fields["run_id"]),
            str(fields["run"]),
            float(fields["job_begun"]),
            tuple(Node(HostFacts(**facts), Place(**place), str(label)) for facts, place, label in fields["nodes"]),
            SlotPlan(tuple(map(_slots_from_json, fields["hosts"])), tuple(map(_slots_from_json, fields["vacated"]))),
            None if fields["begun"] is None else BeginGeneration.from_json(fields["begun"]),
            int(fields["num_replaced"]),
            None if most is None else int(most),
            tuple(LostRank(**loss) for loss in fields["losses"]),
            {int(slot): int(pid) for slot, pid in fields["pids"]},
            tuple(Exit(int(rank), int(pid), 0, float(at)) for rank, pid, at in fields["exits"]),
        )

    def on_own_clock(self, convert: Callable[[float], float]) -> LeaderState:
        """Return the state with its times converted to this host's clock by `convert`."""
        losses = tuple(replace(loss, at=convert(loss.at)) for loss in self.losses)
        exits = tuple(replace(exit, at=convert(exit.at)) for exit in self.exits)
        return replace(self, job_begun=convert(self.job_begun), losses=losses, exits=exits)


def _slots_to_json(host: HostSlots) -> dict[str, Any]:
    return {**asdict(host), "living": sorted(host.living)}


def _slots_from_json(fields: Mapping[str, Any]) -> HostSlots:
    return HostSlots(**{**fields, "living": frozenset(fields["living"])})
