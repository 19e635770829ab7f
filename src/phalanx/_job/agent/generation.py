"""Plan the membership of an elastic job after ranks are lost or added, and the rank of each process, as pure data.

A process is identified by its slot: the rank it was started with. The slot never changes; a replacement gets the slot
of the process that it replaces, and a host that joins gets the slots of a lost host of the same size. The rank in a
generation is the position of the slot among the occupied slots:

    slots      0 1 | 2 3 | 4 5          hosts a, b, c
    b is lost  0 1         2 3          ranks of generation 1: survivors keep their order
    d joins    0 1 | 2 3 | 4 5          generation 2: d gets the slots of b, and all ranks are as at the start

So when the job is complete again, each process has its original rank, and sums are bitwise identical to those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx._job.agent.environment import Place


@dataclass(frozen=True)
class HostSlots:
    """`HostSlots` are the slots of a host. Slots in `living` have a process.

    If `refills` is set, the host starts a new process for each of the others. `name` identifies a host that returns;
    `role` is the role of its ranks.
    """

    member: int
    first_slot: int
    num_slots: int
    living: frozenset[int]
    refills: bool = True
    name: str = ""
    role: str = "default"

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.num_slots)

    @property
    def occupied(self) -> tuple[int, ...]:
        """Return the slots that have a process in the next generation."""
        return tuple(slot for slot in self.slots if self.refills or slot in self.living)


@dataclass(frozen=True)
class ArrivedHost:
    """An `ArrivedHost` is a host that wants to join, and is accepted if the job has room."""

    member: int
    num_ranks: int
    name: str = ""
    role: str = "default"


@dataclass(frozen=True)
class HostAssignment:
    """A `HostAssignment` is one host's share of a generation.

    `slots` is indexed by local rank; the slots in `forked` get a new process.
    """

    member: int
    slots: tuple[int, ...]
    forked: tuple[int, ...]
    place: Place

    def rank_of(self, slot: int) -> int:
        return self.place.first_rank + self.slots.index(slot)


@dataclass(frozen=True)
class Generation:
    """A `Generation` is one membership of the job, with its hosts in the order of their ranks."""

    number: int
    parts: tuple[HostAssignment, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the occupied slots, indexed by rank."""
        return tuple(slot for part in self.parts for slot in part.slots)

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def replacements(self) -> tuple[int, ...]:
        """Return the ranks whose process is new."""
        return tuple(part.rank_of(slot) for part in self.parts for slot in part.forked)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Return the ranks whose process is not new."""
        new = set(self.replacements)
        return tuple(rank for rank in range(self.world_size) if rank not in new)

    def part_of(self, member: int) -> HostAssignment | None:
        """Return a host's part in the generation; None if it has none."""
        return next((part for part in self.parts if part.member == member), None)


@dataclass(frozen=True)
class Limits:
    """`Limits` are the minimum and maximum number of hosts, and the minimum number of ranks."""

    min_hosts: int = 1
    max_hosts: int = 1
    min_ranks: int = 1


@dataclass(frozen=True)
class SlotPlan:
    """A `SlotPlan` lists the hosts of the job with their slots, and the vacated slots of former hosts."""

    hosts: tuple[HostSlots, ...]
    vacated: tuple[HostSlots, ...] = ()

    @classmethod
    def begin(cls, hosts: Sequence[HostSlots]) -> SlotPlan:
        return cls(tuple(hosts))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks in the next generation."""
        return sum(len(host.occupied) for host in self.hosts)

    def lose(self, member: int) -> SlotPlan:
        """Return the plan without a host; its slots stay reserved for a host that joins."""
        gone = [replace(host, living=frozenset()) for host in self.hosts if host.member == member]
        return SlotPlan(tuple(host for host in self.hosts if host.member != member), (*self.vacated, *gone))

    def with_living(self, living: Mapping[int, frozenset[int]], refills: Mapping[int, bool] | None = None) -> SlotPlan:
        """Return the plan with new values of `living` and `refills` for each member."""
        hosts = (
            replace(
                host,
                living=living.get(host.member, host.living) & frozenset(host.slots),
                refills=(refills or {}).get(host.member, host.refills),
            )
            for host in self.hosts
        )
        return SlotPlan(tuple(hosts), self.vacated)

    def accept(self, candidate: ArrivedHost) -> SlotPlan:
        """Return the plan with one more host: in vacated slots of the same number (its own first), else in new ones."""
        fits = [left for left in self.vacated if left.num_slots == candidate.num_ranks]
        own = [left for left in fits if left.name == candidate.name and candidate.name]
        chosen = next(iter(own or fits), None)
        ends = [host.slots.stop for host in (*self.hosts, *self.vacated)]
        first = chosen.first_slot if chosen is not None else max(ends, default=0)
        host = HostSlots(
            candidate.member, first, candidate.num_ranks, frozenset(), name=candidate.name, role=candidate.role
        )
        return self.assign(host)

    def assign(self, host: HostSlots) -> SlotPlan:
        """Return the plan with a host to which `accept` has assigned slots."""
        hosts = sorted((*self.hosts, host), key=lambda each: each.first_slot)
        return SlotPlan(tuple(hosts), tuple(left for left in self.vacated if left.first_slot != host.first_slot))

    def find_missing(self, limits: Limits) -> str:
        """Describe what the job lacks to continue; empty if it lacks nothing."""
        hosts = [host for host in self.hosts if host.occupied]
        lacks = []
        if len(hosts) < limits.min_hosts:
            lacks.append(f"{len(hosts)} of at least {limits.min_hosts} hosts")
        if self.num_ranks < limits.min_ranks:
            lacks.append(f"{self.num_ranks} of at least {limits.min_ranks} ranks")
        return " and ".join(lacks)


def choose_candidates(slot_plan: SlotPlan, candidates: Sequence[ArrivedHost], limits: Limits) -> list[ArrivedHost]:
    """Return the candidates to accept now: as many as the job has room for, returning hosts first."""
    known = {left.name for left in slot_plan.vacated if left.name}
    ordered = sorted(candidates, key=lambda each: each.name not in known)  # sorted is stable
    return ordered[: max(0, limits.max_hosts - len(slot_plan.hosts))]


def plan_generation(number: int, slot_plan: SlotPlan) -> Generation:
    """Return the generation that assigns ranks to all occupied slots; a host without occupied slots has no part."""
    hosts = [host for host in sorted(slot_plan.hosts, key=lambda each: each.first_slot) if host.occupied]
    world_size = sum(len(host.occupied) for host in hosts)
    in_role: dict[str, int] = {}
    for host in hosts:
        in_role[host.role] = in_role.get(host.role, 0) + len(host.occupied)
    parts, first_rank, first_in_role = [], 0, dict.fromkeys(in_role, 0)
    for node, host in enumerate(hosts):
        slots = host.occupied
        place = Place(
            node, len(hosts), first_rank, len(slots), world_size, first_in_role[host.role], in_role[host.role]
        )
        parts.append(
            HostAssignment(host.member, slots, tuple(slot for slot in slots if slot not in host.living), place)
        )
        first_rank += len(slots)
        first_in_role[host.role] += len(slots)
    return Generation(number, tuple(parts))
