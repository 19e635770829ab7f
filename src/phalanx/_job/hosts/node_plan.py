"""Plan which hosts are in the job, and which ranks each gets. The plan is pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx._comm.diagnostics.printable import printable
from phalanx._job.agent.environment import Place

UNFIT = "unfit"  # the kind of a member that joins only to report why its host cannot run the job
_MAX_WORDS = 500


@dataclass(frozen=True)
class HostFacts:
    """`HostFacts` is an agent's description of its host. `address` is where other hosts reach it.

    `nnodes` is the host's --nnodes: "2" or "1:4"; empty without that option (`phalanx join`). `from_json` escapes the
    control characters in other hosts' texts.
    """

    member: int
    name: str
    pid: int
    num_ranks: int
    role: str
    address: str
    node_rank: int | None = None
    run_id: str = ""
    nnodes: str = ""

    @property
    def known_as(self) -> str:
        """Return the name by which a returning host is recognized."""
        return f"{self.name} ({self.address})"

    @classmethod
    def from_json(cls, member: int, facts: Mapping[str, Any]) -> HostFacts | None:
        """Decode the result of `to_json`; return None if the facts are invalid, or the member is not an agent."""
        if facts.get("kind") != "agent":
            return None
        try:
            node_rank, num_ranks = facts["node_rank"], int(facts["num_ranks"])
            if num_ranks < 1 or (node_rank is not None and int(node_rank) < 0):
                return None
            return cls(
                member, printable(str(facts["host"])), int(facts["pid"]), num_ranks, printable(str(facts["role"])),
                printable(str(facts["address"])), None if node_rank is None else int(node_rank),
                printable(str(facts["run_id"])), printable(str(facts.get("nnodes", ""))),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return the facts for joining the job; the coordinator's log names the member by `host`."""
        fields = asdict(self)
        del fields["member"]
        return {"kind": "agent", "host": fields.pop("name"), **fields}


def describe_nnodes(min_nodes: int, max_nodes: int) -> str:
    """Return the value of --nnodes."""
    return f"{min_nodes}" if min_nodes == max_nodes else f"{min_nodes}:{max_nodes}"


@dataclass(frozen=True)
class Node:
    """A `Node` is a host with its ranks; `label` is shown to users, and is distinct even if two names are equal."""

    facts: HostFacts
    place: Place
    label: str

    @property
    def where(self) -> str:
        """Return the host's label and address, as in `node-b (10.0.0.2)`."""
        return f"{self.label} ({self.facts.address})" if self.facts.address else self.label


def describe_unfit(facts: Mapping[str, Any]) -> str:
    """Return a line about a host that has joined but cannot run the job; "" for other members."""
    if facts.get("kind") != UNFIT:
        return ""
    return printable(f"{facts.get('host')} joined, but cannot run the job: {facts.get('why')}"[:_MAX_WORDS])


def find_conflict(hosts: Sequence[HostFacts], max_nodes: int) -> str:
    """Return why these hosts cannot be in one job; "" if they can. `hosts[0]` is the leader."""
    first = hosts[0]
    for host in hosts:
        if host.nnodes and first.nnodes and host.nnodes != first.nnodes:
            return (
                f"{first.name} ({first.address}) was started with --nnodes {first.nnodes}, and {host.name} "
                f"({host.address}) with --nnodes {host.nnodes}. Give the same number on all hosts"
            )
    seen: dict[int, HostFacts] = {}
    for host in hosts:
        if host.node_rank is None:
            continue
        if host.node_rank == 0 and first.node_rank is None:  # a host that took over the lead may have its own node_rank
            return (
                f"{host.name} ({host.address}) was started with --node-rank 0, but the others join {first.name} "
                f"({first.address}): MASTER_ADDR is the address of that host, where rank 0 serves. Start {host.name} "
                "without --node-rank, or start the job there"
            )
        if host.node_rank >= max_nodes:
            return (
                f"{host.name} ({host.address}) was started with --node-rank {host.node_rank}, but --nnodes {max_nodes} "
                f"numbers the hosts from 0 to {max_nodes - 1}"
            )
        other = seen.setdefault(host.node_rank, host)
        if other is not host:
            return (
                f"{other.name} ({other.address}) and {host.name} ({host.address}) were both started with --node-rank "
                f"{host.node_rank}. Give each host its own number"
            )
    return ""


def plan_nodes(hosts: Sequence[HostFacts]) -> list[Node]:
    """Return the hosts in order, with their ranks. A host with a `node_rank` gets that place; the others fill the gaps.

    `hosts` is in the order of joining, beginning with the first host.
    """
    numbered = {host.node_rank: host for host in hosts if host.node_rank is not None}
    rest = iter([host for host in hosts if host.node_rank is None])
    ordered = [numbered[i] if i in numbered else next(rest, None) for i in range(max([len(hosts), *numbered]) + 1)]
    chosen = [host for host in ordered if host is not None]
    world_size = sum(host.num_ranks for host in chosen)
    in_role: dict[str, int] = {}
    nodes, first_rank = [], 0
    labels = make_distinct([host.name for host in chosen])
    for node, host in enumerate(chosen):
        first_role_rank = in_role.get(host.role, 0)
        in_role[host.role] = first_role_rank + host.num_ranks
        place = Place(node, len(chosen), first_rank, host.num_ranks, world_size, first_role_rank, 0)
        nodes.append(Node(host, place, labels[node]))
        first_rank += host.num_ranks
    return [replace(node, place=replace(node.place, role_world_size=in_role[node.facts.role])) for node in nodes]


def make_distinct(names: Sequence[str]) -> list[str]:
    """Return distinct labels for hosts: short names if these differ, numbered names if two hosts have the same name."""
    short = [name.partition(".")[0] for name in names]
    chosen = short if len(set(short)) == len(set(names)) else list(names)
    counts = Counter(chosen)
    return [name if counts[name] == 1 else f"{name}#{i}" for i, name in enumerate(chosen)]


def find_node(nodes: Iterable[Node], ranks: Iterable[int]) -> Node | None:
    """Return the host that has all these ranks; None if no single host has them all."""
    wanted = set(ranks)
    return next((node for node in nodes if all(rank in node.place.ranks for rank in wanted)), None)
