"""Decide, on the leader, how an elastic job reacts when hosts are lost, leave, join, return, or wait as spares.

    joins ──▶ spare ──room──▶ arriving: its ranks start, but do not train ──all are ready──▶ in the job
                │                                                                            ▲
                └── a host was lost: at once, in its place ──────────────────────────────────┘

A joining host never stalls the ranks that train: it is accepted at the first step after all its ranks are ready. A
spare replaces a lost host at once, and the other hosts wait for its ranks as they wait for a restarted rank. If fewer
ranks or hosts than the minimum are left, the ranks keep their state in memory for up to `wait_s`; then they are ordered
to save it and exit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.agent.elastic import ALL_LEFT, OVER, Elastic, ElasticPhase, ElasticRank
from phalanx._job.agent.elastic_actions import (
    BeginGeneration,
    DropHost,
    ElasticAction,
    LostRank,
    PrepareHost,
    Print,
    SendToRank,
)
from phalanx._job.agent.failure import ExceptionReport, Exit, RankFailure, summarise
from phalanx._job.agent.generation import ArrivedHost, HostSlots, Limits, SlotPlan, choose_candidates, plan_generation

_MAX_TRIES = 2  # the first attempt may fail because the new ranks started too slowly


@dataclass
class JoiningHost:
    """A `JoiningHost` is a host whose ranks start while the job's ranks train."""

    slots: HostSlots
    members: dict[int, ElasticRank] = field(default_factory=dict)
    reports: dict[int, ExceptionReport] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Return whether all ranks of the host are ready to train."""
        return len(self.members) == self.slots.num_slots and all(member.joined for member in self.members.values())


class ElasticHosts(Elastic):
    """`ElasticHosts` is `Elastic` for several hosts; `own` is the member number of the leader, which cannot be lost."""

    def __init__(
        self,
        slot_plan: SlotPlan,
        max_replacements: int | None,
        limits: Limits,
        own: int,
        host_timeout_s: float,
    ) -> None:
        super().__init__(slot_plan, max_replacements, limits)
        self._own = own
        self._host_timeout_s = host_timeout_s
        self.spares: dict[int, ArrivedHost] = {}  # by member, in the order of joining
        self.arrivals: dict[int, JoiningHost] = {}
        self._untried: set[int] = set()  # new hosts of this generation, until its group is formed
        self._tries = 0  # the number of failed attempts to form that group
        self._waits_since: float | None = None
        self._waits_for = ""

    def restore_members(self, members: Iterable[ElasticRank], forking: Iterable[int]) -> None:
        """Restore the running ranks, and the slots whose processes are being forked."""
        for member in members:
            self.members[member.slot] = member
            self._repetition.on_step(member.step)
        self._forking |= set(forking)

    def restore_lost(self, slot: int, lost: LostRank) -> None:
        """Restore a lost rank that no decision has covered yet."""
        self._lost_slots.add(slot)
        self._undecided_losses.append(lost)

    @property
    def gone(self) -> frozenset[int]:
        """Return the slots of lost ranks that no decision has covered yet."""
        return frozenset(self._lost_slots)

    @property
    def wait_s(self) -> float:
        """Return for how many seconds the ranks keep their state while too few hosts are left."""
        return min((member.wait_s for member in self.members.values() if member.joined), default=0.0)

    @property
    def is_waiting(self) -> bool:
        """Return whether the ranks wait for more hosts, because too few are left."""
        return self._waits_since is not None and super().phase not in OVER

    @property
    def phase(self) -> ElasticPhase:
        return ElasticPhase.WAITING if self.is_waiting else super().phase

    def on_started(self, slot: int, pid: int) -> None:
        arrival = self._arrival_of(slot)
        if arrival is not None:
            arrival.members[slot] = ElasticRank(slot, pid)
        else:
            super().on_started(slot, pid)

    def on_message(self, slot: int, pid: int, message: Mapping[str, Any], now: float) -> list[ElasticAction]:
        arrival = self._arrival_of(slot)
        kind = message.get("kind")
        if arrival is None:
            actions = super().on_message(slot, pid, message, now)
            if kind == "regrouped" and message.get("generation") == self.generation.number:
                self._untried.clear()
                self._tries = 0
            if kind in ("regrouped", "elastic"):
                actions += self._accept_arrivals(now)
            if kind == "elastic":  # from now on hosts may join
                actions += self._start_spares(now)
            return actions
        member = arrival.members.get(slot)
        if member is None or member.pid != pid:
            return []
        if kind == "outlives":
            member.outlives = True
        if kind == "elastic":
            self._on_joined(member, message)  # its generation is set when its host is accepted
            member.holds_state = False
        return self._accept_arrivals(now)

    def on_report(self, report: ExceptionReport, now: float) -> list[ElasticAction] | None:
        """Process an uncaught exception in a rank."""
        arrival = self._arrival_of(report.rank)
        if arrival is None:
            return super().on_report(report, now)
        arrival.reports[report.rank] = report
        return []

    def on_exit(self, exit: Exit, now: float) -> list[ElasticAction] | None:
        """Process the exit of a rank's process."""
        arrival = self._arrival_of(exit.rank)
        if arrival is None:
            return super().on_exit(exit, now)
        del self.arrivals[arrival.slots.member]
        how = summarise(RankFailure(exit.rank, arrival.reports.get(exit.rank), exit))
        why = f"a rank on it exited before it could join the group: {how}"
        return [DropHost(arrival.slots.member, why), *self._start_spares(now)]

    def on_host_joined(self, candidate: ArrivedHost, now: float) -> list[ElasticAction]:
        """Process a host that has joined: start its ranks if there is room, or keep it as a spare."""
        self.spares[candidate.member] = candidate
        return self._start_spares(now)

    def on_host_lost(self, member: int, label: str, why: str, now: float) -> list[ElasticAction] | None:
        """Process the loss of a host; return None if the job cannot survive it, so that it is an ordinary failure."""
        if self._drop_newcomer(member):
            return self._start_spares(now)
        host = self._find_host(member)
        if host is None or not self.active:
            return None
        for slot in host.slots:
            if slot in self.generation.slots:
                self._undecided_losses.append(self._lose_slot(slot, label, why, now))
        self._remove_host(host)
        self._repetition.on_loss()
        return self._decide(now)

    def on_host_leaves(self, member: int, name: str, now: float) -> list[ElasticAction] | None:
        """Process a host's request to leave while its ranks run; return None if the job cannot continue without it."""
        if self._drop_newcomer(member):
            return self._start_spares(now)
        host = self._find_host(member)
        if host is None or not self.active:
            return None
        if not any(other.holds_state for slot, other in self.members.items() if slot not in host.slots):
            return None
        self._remove_host(host)
        how = f"{name}, with {name_ranks(list(host.slots))}, leaves after this step (SIGTERM)"
        actions = self._decide(now, how)
        is_reported = any(isinstance(action, BeginGeneration) for action in actions)
        return actions if is_reported else [Print(f"phalanx run: {how}"), *actions]

    def _find_host(self, member: int) -> HostSlots | None:
        return next((host for host in self.slot_plan.hosts if host.member == member), None)

    def _drop_newcomer(self, member: int) -> bool:
        """Forget `member` if it is a spare or still starting its ranks; return whether it was either."""
        return self.spares.pop(member, None) is not None or self.arrivals.pop(member, None) is not None

    def _remove_host(self, host: HostSlots) -> None:
        """Remove a host; keep its slots for a host that joins later."""
        self._lost_slots |= set(host.slots) & set(self.generation.slots)
        for slot in host.slots:
            self._forking.discard(slot)
            self._forget(slot)
        self.slot_plan = self.slot_plan.lose(host.member)
        self._untried.discard(host.member)

    def on_time(self, now: float) -> list[ElasticAction]:
        actions = super().on_time(now)
        if self._waits_since is not None and self.is_waiting and now >= self._waits_since + self.wait_s:
            why = f"{self._waits_for} left, and no host has joined within {self.wait_s:g} s"
            actions += self._save_and_end(why)
            self._waits_since = None
            self._plan_due()
        return actions

    def silence_s(self, slot: int) -> float:
        """Return for how many seconds a slot's process may delay others; another host may be cut off for a while."""
        is_own = any(slot in host.slots for host in self.slot_plan.hosts if host.member == self._own)
        return super().silence_s(slot) + (0.0 if is_own else self._host_timeout_s)

    def plan_refills(self, living: frozenset[int]) -> dict[int, bool]:
        """Return for each host whether its empty slots get new processes; a new host's slots always do."""
        empty = sum(
            slot not in living
            for host in self.slot_plan.hosts
            if host.member not in self._untried
            for slot in host.slots
        )
        refills = self._may_replace(empty)
        return {host.member: refills or host.member in self._untried for host in self.slot_plan.hosts}

    def _lose_slot(self, slot: int, label: str, why: str, now: float) -> LostRank:
        gone = self.members.get(slot) or ElasticRank(slot, 0)
        why = f"its host, {label}, is lost: {why}"
        step = max(self.step, gone.step)
        return LostRank(slot, self.rank_of(slot), gone.pid, why, now, self.generation.number, step, label)

    def pid_of(self, slot: int) -> int | None:
        """Return the pid of the process in a slot; None if no process runs there."""
        arrival = self._arrival_of(slot)
        member = (self.members if arrival is None else arrival.members).get(slot)
        return None if member is None else member.pid

    def is_arriving(self, slot: int) -> bool:
        """Return whether this slot belongs to a host that is not accepted yet."""
        return self._arrival_of(slot) is not None

    def _arrival_of(self, slot: int) -> JoiningHost | None:
        return next((each for each in self.arrivals.values() if slot in each.slots.slots), None)

    def _with_arrivals(self) -> SlotPlan:
        slot_plan = self.slot_plan
        for arrival in self.arrivals.values():
            slot_plan = slot_plan.assign(arrival.slots)
        return slot_plan

    def _find_slots(self, candidate: ArrivedHost) -> HostSlots:
        hosts = self._with_arrivals().accept(candidate).hosts
        return next(host for host in hosts if host.member == candidate.member)

    def _start_spares(self, now: float) -> list[ElasticAction]:
        """Start ranks on spares, if there is room."""
        if not self.active:
            return []
        if self.is_waiting:
            return self._decide(now)
        actions: list[ElasticAction] = []
        for candidate in choose_candidates(self._with_arrivals(), list(self.spares.values()), self.limits):
            del self.spares[candidate.member]
            slots = self._find_slots(candidate)
            self.arrivals[candidate.member] = JoiningHost(slots)
            # The new ranks start with the rank numbers that they would have if their host were accepted now.
            generation = plan_generation(self.generation.number + 1, self._with_arrivals())
            actions.append(PrepareHost(slots, BeginGeneration(generation, (), ())))
        return actions

    def _accept_arrivals(self, now: float) -> list[ElasticAction]:
        """Accept the hosts that are ready: their ranks train from the next step on."""
        ready = [arrival for arrival in self.arrivals.values() if arrival.is_ready]
        if not ready or not self.active or self._exits or self._forking:
            return []
        number = self.generation.number
        if not self.is_waiting and any(member.generation != number for member in self.members.values()):
            return []  # some ranks still form the current group; they are notified of the next group afterwards
        joining = {"kind": "joining", "generation": number + 1}
        actions: list[ElasticAction] = [SendToRank(slot, joining) for slot in self.members]
        for arrival in ready:
            del self.arrivals[arrival.slots.member]
            self.slot_plan = self.slot_plan.assign(replace(arrival.slots, living=frozenset(arrival.members)))
            self._untried.add(arrival.slots.member)
            self.members.update(arrival.members)
        names = ", ".join(arrival.slots.name for arrival in ready)
        return [*(() if self.is_waiting else actions), *self._decide(now, f"{names}: accepted")]

    def _decide(self, now: float, without_loss: str = "") -> list[ElasticAction]:
        if without_loss == ALL_LEFT and self._untried:
            self._tries += 1
            if self._tries >= _MAX_TRIES:
                return self._drop_untried(now)
        is_short = bool(self._lost_slots) or self.is_waiting
        taken = choose_candidates(self._with_arrivals(), list(self.spares.values()), self.limits) if is_short else []
        for candidate in taken:
            del self.spares[candidate.member]
            self.slot_plan = self.slot_plan.assign(self._find_slots(candidate))
            self._untried.add(candidate.member)
        actions = super()._decide(now, without_loss)
        if any(isinstance(action, BeginGeneration) for action in actions):
            self._waits_since, self._waits_for = None, ""
            self._plan_due()
        return actions

    def _drop_untried(self, now: float) -> list[ElasticAction]:
        """Continue without the new hosts of a group that could not be formed."""
        why = "the others could not form a group with it (their output shows the reason)"
        dropped = [DropHost(member, why) for member in sorted(self._untried)]
        actions: list[ElasticAction] = [*dropped]
        for drop in dropped:
            for host in [host for host in self.slot_plan.hosts if host.member == drop.member]:
                self._remove_host(host)
        self._untried.clear()
        self._tries = 0
        return [*actions, *super()._decide(now, "a new host is rejected")]

    def _end(self, missing: str, now: float) -> list[ElasticAction]:
        """Wait for more hosts, because too few are left; save the state and end the job if the ranks do not wait."""
        if self.wait_s <= 0:
            return self._save_and_end(f"{missing} left, and the ranks do not wait for more")
        if self._waits_since is not None:
            return []
        self._waits_since, self._waits_for = now, missing
        self._plan_due()
        return [
            Print(
                f"phalanx run: {missing} left: the ranks keep their state, and wait up to {self.wait_s:g} s for "
                "more (`phalanx join` on another host)"
            )
        ]

    def _plan_due(self) -> None:
        super()._plan_due()
        if self._waits_since is not None:
            limit = self._waits_since + self.wait_s
            self.next_due = limit if self.next_due is None else min(self.next_due, limit)

    def _describe_loss(self, lost: list[LostRank], forked: set[int], without_loss: str) -> str:
        host_losses = [each for each in lost if each.host]  # the loss of their hosts was already printed
        rest = [each for each in lost if not each.host]
        if rest or not (host_losses or without_loss):
            return super()._describe_loss(rest, forked, without_loss)
        size = self.generation.world_size
        count = f"{size} rank{'s' * (size != 1)} on {len(self.generation.parts)} host" + "s" * (
            len(self.generation.parts) != 1
        )
        before = f"{without_loss}; " if without_loss else ""
        verb = "is" if len(forked) == 1 else "are"
        restarted = f": {name_ranks(sorted(map(self.rank_of, forked)))} {verb} restarted" if forked else ""
        return f"phalanx run: {before}{count} continue{'s' * (size == 1)}{restarted}"
