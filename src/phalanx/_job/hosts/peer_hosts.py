"""`PeerHosts` tracks the other hosts of an attempt (present, lost, or joined late), and orders them to start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from phalanx._job.agent.elastic_actions import BeginGeneration
from phalanx._job.agent.environment import Place
from phalanx._job.agent.generation import HostSlots, Limits, SlotPlan
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.control_channel import Change, ControlChannel
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import HostFacts, Node, find_node
from phalanx._job.output.screen import fill_template


class PeerHosts:
    """`PeerHosts` maps member numbers to the other hosts of one attempt."""

    def __init__(
        self, channel: ControlChannel, nodes: list[Node], own: Node, host_timeout_s: float, limits: Limits | None = None
    ) -> None:
        self.channel = channel
        self.nodes = nodes
        self.own = own
        self.host_timeout_s = host_timeout_s
        self.limits = limits or Limits(1, len(nodes))
        self.others = {node.facts.member: node for node in nodes if node is not own}
        self.lost: dict[int, str] = {}  # member -> why
        self.late: dict[int, Change] = {}  # member -> its `Change`: hosts that have joined since the start, and wait
        self.spares: set[int] = set()  # late hosts that were notified that they wait to replace a lost host
        self.accepted: dict[int, Change] = {}  # the late hosts that an elastic job has accepted

    @property
    def own_and_present(self) -> list[Node]:
        """Return this host and the remaining other hosts, in rank order; hosts accepted later come last."""
        return [node for node in self.nodes if node is self.own or node.facts.member in self._present_members]

    @property
    def _present_members(self) -> set[int]:
        return self.others.keys() - self.lost.keys()

    @property
    def present(self) -> list[Node]:
        return [node for member, node in self.others.items() if member not in self.lost]

    def find_other(self, rank: int) -> Node | None:
        """Return the other host that runs `rank`; None if no remaining host does."""
        return next((node for node in self.present if rank in node.place.ranks), None)

    def name_host(self, ranks: Iterable[int]) -> str:
        """Return the label of the host of these ranks; "" if no single host has them all."""
        node = find_node(self.nodes, ranks)
        return node.label if node is not None else ""

    def fill_prefix(self, template: str, rank: int) -> str:
        """Return the prefix of `rank`'s lines, from the user's template."""
        node = find_node(self.nodes, [rank]) or self.own
        facts, local_rank = node.facts, rank - node.place.first_rank
        return fill_template(template, rank=rank, local_rank=local_rank, role=facts.role, host=facts.name)

    def lose(self, member: int, why: str) -> Node | None:
        """Mark a host as lost, and return it; return None if it is not in this attempt, or already lost."""
        node = self.others.get(member)
        if node is None or member in self.lost:
            return None
        self.lost[member] = why
        return node

    def reject(self, member: int, conflict: str) -> None:
        """Reject a host that has joined while the job runs; its command exits."""
        self.channel.put(member, "end", code=2, why=f"phalanx run: {conflict}.")

    def plan_elastic(self, max_restarts: int | None, restart_count: int) -> ElasticHosts:
        """Return the `ElasticHosts` of a job with all ranks of these hosts.

        Restarts of the whole job count as replacements of lost ranks.
        """
        hosts = [
            HostSlots(
                node.facts.member,
                node.place.first_rank,
                node.place.num_ranks,
                frozenset(node.place.ranks),
                name=node.facts.known_as,
                role=node.facts.role,
            )
            for node in self.nodes
        ]
        own = self.own.facts.member
        max_replacements = None if max_restarts is None else max(0, max_restarts - restart_count)
        return ElasticHosts(SlotPlan.begin(hosts), max_replacements, self.limits, own, self.host_timeout_s)

    def accept(self, slots: HostSlots, place: Place) -> Node | None:
        """Assign slots to a late host; return the host, or None if it has left. `place` has its rank numbers."""
        change = self.late.pop(slots.member, None)
        facts = None if change is None else HostFacts.from_json(change.member, change.facts)
        if change is None or facts is None:
            return None
        self.accepted[slots.member] = change
        # a returning host keeps its label; a host with the same name as another gets a number
        known = [node for node in self.nodes if node.facts.known_as == facts.known_as]
        names = {node.label for node in self.nodes}
        short = facts.name.partition(".")[0]
        others = (f"{short}#{i}" for i in range(len(names) + 1))
        if known:
            label = known[-1].label
        else:
            taken = any(name.partition("#")[0] == short for name in names)
            label = next(name for name in others if name not in names) if taken else short
        node = Node(facts, place, label)
        self.nodes = [each for each in self.nodes if not set(each.place.ranks) & set(place.ranks)]
        self.nodes.append(node)
        self.others[slots.member] = node
        return node

    def send_start(self, node: Node, plan: JobPlan, restart_count: int, begun: BeginGeneration | None = None) -> None:
        """Order another host to start its ranks: those of the first generation, or of `begun`."""
        self.channel.put(
            node.facts.member,
            "start",
            attempt=restart_count,
            place=asdict(node.place),
            run_id=plan.run_id,
            run=plan.run,
            master=[plan.master_addr, plan.master_port],
            first_host=self.own.where,
            begun=None if begun is None else begun.to_json(),
        )
