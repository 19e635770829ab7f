"""`Elastic` decides how an elastic job continues when a rank is lost. It has no clock, process or socket.

    STARTING    all ranks have joined ──────────────▶ TRAINING
    TRAINING    a rank is lost ─────────────────────▶ LOSING
                a host joins, or leaves in order ───▶ REGROUPING
    LOSING      who was about to end has ended ─────▶ REGROUPING
                too few are left ───────────────────▶ WAITING
    WAITING     enough hosts have come ─────────────▶ REGROUPING
                nobody comes in time ───────────────▶ ENDING: the ranks save, and end
    REGROUPING  every rank is in the new group ─────▶ TRAINING
                another rank is lost ───────────────▶ LOSING
    any of them a rank finishes its training ───────▶ FINISHED: an ordinary job from now on
                nobody holds the state, or replacements would not help ──▶ GIVEN_UP: an ordinary failure

A rank is identified by its slot, the number with which it was started (`agent.generation`); a replacement has the slot
of the rank that it replaces, and another process number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from phalanx._base.loss_detection import DYING_S, ENDING_S, SILENT_RANK_S, STARTING_S
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.agent.elastic_actions import (
    LEAVE,
    Abandon,
    BeginGeneration,
    Continue,
    ElasticAction,
    Evict,
    GiveUp,
    LostRank,
    Print,
    Retire,
    SendGeneration,
    SendToRank,
    read_int,
    refuse,
)
from phalanx._job.agent.failure import ExceptionReport, Exit, RankFailure, summarise
from phalanx._job.agent.generation import Limits, SlotPlan, plan_generation

BELOW_MINIMUM_EXIT_CODE = 75  # EX_TEMPFAIL: the job's scheduler may start it again
ALL_LEFT = "all ranks have left their group"
_HAS_ENDED = "another rank has ended its training"


class ElasticPhase(Enum):
    """An `ElasticPhase` is how far an elastic job is; the module's drawing shows all of them."""

    STARTING = "starting"
    TRAINING = "training"
    LOSING = "losing"
    WAITING = "waiting"
    REGROUPING = "regrouping"
    FINISHED = "finished"
    ENDING = "ending"
    GIVEN_UP = "given up"


OVER = (ElasticPhase.FINISHED, ElasticPhase.ENDING, ElasticPhase.GIVEN_UP)
TRANSITIONS: Mapping[ElasticPhase, Set[ElasticPhase]] = {
    ElasticPhase.STARTING: {ElasticPhase.TRAINING, *OVER},
    ElasticPhase.TRAINING: {ElasticPhase.LOSING, ElasticPhase.REGROUPING, ElasticPhase.WAITING, *OVER},
    ElasticPhase.LOSING: {ElasticPhase.REGROUPING, ElasticPhase.WAITING, *OVER},
    ElasticPhase.WAITING: {ElasticPhase.REGROUPING, *OVER},
    ElasticPhase.REGROUPING: {ElasticPhase.TRAINING, ElasticPhase.LOSING, ElasticPhase.WAITING, *OVER},
    ElasticPhase.FINISHED: {ElasticPhase.GIVEN_UP},
    ElasticPhase.ENDING: set(),
    ElasticPhase.GIVEN_UP: set(),
}


@dataclass
class ElasticRank:
    """An `ElasticRank` is a process in a slot. `holds_state`: others can continue from its state. `generation` is the
    latest that it has joined.
    """

    slot: int
    pid: int
    joined: bool = False
    holds_state: bool = False
    outlives: bool = False  # whether it outlives its zygote
    generation: int = 0
    step: int = -1
    min_ranks: int = 1
    wait_s: float = 0.0
    lost_generation: int = -1  # the latest generation that it has reported as over
    progress: dict[str, Any] = field(default_factory=dict)
    report: ExceptionReport | None = None  # its report, if it is about to end
    told: tuple[bool, str] | None = None  # of its loss: whether the ranks disagreed, and its error
    due: tuple[float, str] | None = None  # when to kill it, and why
    evicted: str = ""  # why it was killed, and has not ended yet
    abandon_at: float | None = None  # when the job continues although the killed process has not ended
    continued: bool = False  # it was sent SIGCONT instead of being killed


class Elastic:
    """`Elastic` makes the decisions for an elastic job. Every method takes an event and returns actions."""

    def __init__(self, slot_plan: SlotPlan, max_replacements: int | None = None, limits: Limits | None = None) -> None:
        self.slot_plan = slot_plan
        self.limits = limits or Limits()
        self.max_replacements = max_replacements
        self.members: dict[int, ElasticRank] = {}
        self.generation = plan_generation(0, slot_plan)
        self.losses: list[LostRank] = []
        self.num_replaced = 0
        self.has_trained = False  # a rank has returned from training, and has reported it
        self.finished = False  # a rank has finished its training, or has ended in order
        self._over: ElasticPhase | None = None  # ENDING or GIVEN_UP, once that was decided
        self._outrun = False  # the ranks finished in the generation before the newest, which will never form
        self.is_script_elastic = False  # its source says so; a rank reports it later
        self.began_at = 0.0
        self._has_joined = False  # a rank has reached its first `elastic.run`
        self._killed_early_at: float | None = None  # when a rank was killed before all had reached the first
        self._ending: dict[str, Any] = {}  # the message that asked the ranks to save and end
        self.next_due: float | None = None
        self._exits: list[tuple[Exit, ExceptionReport | None]] = []  # the losses that are not decided yet
        self._newest: list[LostRank] = []  # the same losses, in words for people
        self._gone: set[int] = set()  # the undecided slots that were lost with their host
        self._refuses_forks = False  # set when the system has refused to fork
        self._forking: set[int] = set()  # slots whose process is on its way
        self._repetition = Repetition()

    @property
    def phase(self) -> ElasticPhase:
        if self._over is not None:
            return self._over
        if self.finished:
            return ElasticPhase.FINISHED
        if self._exits or self._gone:
            return ElasticPhase.LOSING
        if not self.generation.number:
            return ElasticPhase.TRAINING if self._all_have_joined else ElasticPhase.STARTING
        return ElasticPhase.TRAINING if self.is_regrouped else ElasticPhase.REGROUPING

    @property
    def _all_have_joined(self) -> bool:
        """Return whether every started process has reached `elastic.run`; a replacement may still be starting."""
        return (
            any(member.joined for member in self.members.values())
            and len({*self.members, *self._forking, *self._gone}) + len(self._exits) >= self.generation.world_size
            and all(member.joined or self.generation.number for member in self.members.values())
        )

    @property
    def active(self) -> bool:
        """Return whether the job would survive a loss."""
        return self.phase not in OVER and self._all_have_joined

    @property
    def is_regrouped(self) -> bool:
        """Return whether all ranks are in the newest generation, and none is on its way."""
        number = self.generation.number
        return not self._forking and all(member.generation == number for member in self.members.values())

    @property
    def step(self) -> int:
        """Return the last step that a rank is known to have completed."""
        return self._repetition.best_step

    def on_step(self, step: int) -> None:
        self._repetition.on_step(step)

    def rank_of(self, slot: int) -> int:
        """Return the rank of a slot in the current generation."""
        slots = self.generation.slots
        return slots.index(slot) if slot in slots else slot

    def on_started(self, slot: int, pid: int) -> None:
        """Note that a process was forked into a slot."""
        self.members[slot] = ElasticRank(slot, pid)
        self._forking.discard(slot)

    def on_message(self, slot: int, pid: int, message: Mapping[str, Any], now: float) -> list[ElasticAction]:
        """Process a message of a rank; an invalid message is ignored."""
        member = self.members.get(slot)
        if member is None or member.pid != pid:
            return []
        kind = message.get("kind")
        generation = read_int(message.get("generation"), 0)
        step = read_int(message.get("step"), -1)
        if step > member.step:
            member.step = step
        if kind in ("progress", "lost", "failed"):
            self._repetition.on_step(step)
        if kind == "elastic":
            return self._on_joined(member, message, generation)
        if kind == "outlives":
            member.outlives = True
        elif kind == "progress":
            member.progress = dict(message)
        elif kind == "regrouped":
            return self._on_regrouped(member, generation, now)
        elif kind == "lost":
            disagrees, error = message.get("disagrees") is True, str(message.get("error", ""))
            return self._on_reported_loss(member, generation, (disagrees, error), now)
        elif kind == "waiting":
            return self._on_waiting(member, generation, now)
        elif kind == "finished":
            self.has_trained = True
            return self._finish(member)
        return []

    def claims(self, slot: int, pid: int) -> bool:
        """Return whether the end of this process is a loss that the job survives."""
        member = self.members.get(slot)
        return member is not None and member.pid == pid and self.active

    def on_report(self, report: ExceptionReport, now: float) -> list[ElasticAction] | None:
        """Process an uncaught exception in a rank, which is ending; return None for an ordinary failure."""
        if not self.claims(report.rank, report.pid):
            return None
        self.members[report.rank].report = report
        self._set_due(report.rank, now + ENDING_S, f"it did not end within {ENDING_S:g} s of its exception")
        return []

    def on_exit(self, exit: Exit, now: float) -> list[ElasticAction] | None:
        """Process the end of a rank's process; return None if nothing follows (it ended well, or is not elastic)."""
        member = self.members.get(exit.rank)
        if member is None or member.pid != exit.pid:
            return None
        if exit.is_orderly and member.report is None:
            self._finish(member)
        if not self.active:
            self.note_early_loss(exit)
            self._forget(exit.rank)
            return None
        self._forget(exit.rank)
        self._exits.append((exit, member.report))
        why = member.evicted or summarise(RankFailure(exit.rank, member.report, exit))
        step = max(self.step, member.step)
        lost = LostRank(exit.rank, self.rank_of(exit.rank), exit.pid, why, exit.at, self.generation.number, step)
        self._newest.append(lost)
        self._repetition.on_loss()
        return self._decide(now)

    @property
    def lost_early(self) -> bool:
        """Return whether a rank of an elastic script was killed before all had reached `elastic.run`.

        A script may mention `elastic.run` without calling it, so its source counts only in the first minutes.
        """
        if self._killed_early_at is None:
            return False
        return self._has_joined or (self.is_script_elastic and self._killed_early_at - self.began_at < STARTING_S)

    def note_early_loss(self, exit: Exit) -> None:
        """Record the end of a process that was killed before all ranks had reached their first `elastic.run`."""
        member = self.members.get(exit.rank)
        if member is None or member.pid != exit.pid or exit.status >= 0 or member.report is not None:
            return
        if self.phase is ElasticPhase.STARTING and self.step < 0:
            self._killed_early_at = exit.at

    def on_unforked(self, slot: int, why: str, now: float) -> list[ElasticAction] | None:
        """Process the system's refusal to start a process for a slot; return None if it was one of the first."""
        if not self.generation.number or slot in self.members:
            return None
        self._refuses_forks = True
        self._forking.discard(slot)
        return [Print(f"phalanx run: rank {self.rank_of(slot)} could not be replaced: {why}"), *self._decide(now)]

    @property
    def awaited(self) -> tuple[int, ...]:
        """Return the slots whose process is on its way."""
        return tuple(sorted(self._forking))

    def on_no_forks(self, now: float) -> list[ElasticAction]:
        """Note that no more processes can be forked."""
        self._refuses_forks = True
        missing, self._forking = self._forking, set()
        return self._decide(now) if missing else []

    def on_time(self, now: float) -> list[ElasticAction]:
        """Execute what is due; the agent calls this at `next_due`."""
        actions: list[ElasticAction] = []
        for member in list(self.members.values()):
            if member.due is not None and now >= member.due[0]:
                (_, why), member.due = member.due, None
                actions += self.evict(member.slot, why, now)
            if member.abandon_at is not None and now >= member.abandon_at:
                member.abandon_at = None
                actions.append(Abandon(member.slot))
        self._plan_due()
        return actions

    def evict(self, slot: int, why: str, now: float) -> list[ElasticAction]:
        """Kill the process in a slot, unless it alone holds the state; the rest follows from its end."""
        member = self.members.get(slot)
        if member is None:
            return []
        others = [other for other in self.members.values() if other is not member and other.holds_state]
        if member.holds_state and member.report is None and not others and not member.continued:
            member.continued = True
            said = "it alone holds the state of the training: it is sent SIGCONT, and not killed yet"
            return [Print(f"phalanx run: rank {self.rank_of(slot)} (pid {member.pid}): {said}"), Continue(slot)]
        if member.report is None:
            member.evicted = f"killed: {why}"
        if member.abandon_at is None:
            member.abandon_at = now + DYING_S
        self._plan_due()
        return [Evict(slot, why)]

    def is_evicted(self, pid: int) -> bool:
        """Return whether this process is to be killed because it kept the others waiting, and has not ended yet."""
        return any(member.pid == pid and member.evicted for member in self.members.values())

    def give_up(self) -> GiveUp:
        """Treat losses that are not decided yet, and all later ones, as ordinary failures."""
        self._over = self._over or ElasticPhase.GIVEN_UP
        self._kill_nobody()
        exits, self._exits = self._exits, []
        return GiveUp(tuple(e for e, _ in exits), tuple(r for _, r in exits if r is not None))

    def _finish(self, finisher: ElasticRank) -> list[ElasticAction]:
        """Continue as an ordinary job, and refuse ranks that wait for a generation."""
        self.finished = True
        self._kill_nobody()
        if self.phase is ElasticPhase.ENDING:
            return []
        members = self.members.values()
        actions: list[ElasticAction] = [
            refuse(member.slot, _HAS_ENDED) for member in members if member.lost_generation >= self.generation.number
        ]
        if finisher.generation < self.generation.number and not self._outrun:
            self._outrun = True
            late = [member for member in members if member.joined and not member.holds_state]
            actions += [action for member in late for action in self._turn_away(member)]
        return actions

    def _turn_away(self, member: ElasticRank) -> list[ElasticAction]:
        """Answer a rank that came to a generation which will never form. Who came to join leaves; a replacement fails,
        as the rank that it replaces did.
        """
        if any(lost.slot == member.slot for lost in self._newest_losses):
            return [refuse(member.slot, _HAS_ENDED)]
        said = f"phalanx run: rank {self.rank_of(member.slot)} leaves: it came when the training had ended"
        return [Print(said), SendToRank(member.slot, LEAVE)]

    def _on_joined(self, member: ElasticRank, message: Mapping[str, Any], generation: int) -> list[ElasticAction]:
        member.joined = self._has_joined = True
        member.min_ranks = read_int(message.get("min_ranks"), 1)
        if not self.generation.number:
            member.holds_state = True
        wait_s = message.get("wait_s")
        member.wait_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0
        if self.phase is ElasticPhase.ENDING:  # the others were notified before
            return [SendToRank(member.slot, self._ending)]
        if self._outrun and not member.holds_state:
            return self._turn_away(member)
        return [SendGeneration(member.slot)] if self.generation.number and not self._exits else []

    def _on_regrouped(self, member: ElasticRank, generation: int, now: float) -> list[ElasticAction]:
        member.generation = generation
        member.holds_state = True
        if generation != self.generation.number or self._exits or not self.is_regrouped:
            return []
        if self.phase is ElasticPhase.GIVEN_UP:
            return []
        lost = self._newest_losses
        return [Print(describe_regrouped(lost, len(self.members), now))] if lost else []

    @property
    def _newest_losses(self) -> tuple[LostRank, ...]:
        number = self.generation.number
        return tuple(lost for lost in self.losses if lost.generation == number - 1)

    def _on_reported_loss(
        self, member: ElasticRank, generation: int, told: tuple[bool, str], now: float
    ) -> list[ElasticAction]:
        """Note that a rank has left a generation. If no process has ended, it waits for those that have not left it."""
        member.lost_generation = max(member.lost_generation, generation)
        if why := self._find_no_generation():
            return [refuse(member.slot, why)]
        if generation != self.generation.number or self._exits or not self.active:
            return []
        member.told = member.told or told
        silent = [other for other in self.members.values() if other.lost_generation < generation]
        if not silent:
            self._repetition.on_loss()
            all_told = [other.told for other in self.members.values() if other.told is not None]
            if disagreement := next((error for disagrees, error in all_told if disagrees), ""):
                self._repetition.on_disagreement(disagreement)
            return self._decide(now, ALL_LEFT)
        self._set_due_silent(member, silent, now)
        for other in self.members.values():
            if other.lost_generation >= generation and other.report is None:
                other.due = None
        return []

    def _set_due_silent(self, member: ElasticRank, silent: list[ElasticRank], now: float) -> None:
        for other in silent:
            if other.due is None and not other.evicted:
                span_s = self.silence_s(other.slot)
                why = f"rank {self.rank_of(member.slot)} has given up on their group, and it has not for {span_s:g} s"
                self._set_due(other.slot, now + span_s, why)

    def _on_waiting(self, member: ElasticRank, generation: int, now: float) -> list[ElasticAction]:
        """Answer a rank that waits for a generation after this one, so that it does not wait in vain."""
        if generation < self.generation.number and not self._exits:
            return [SendGeneration(member.slot)]
        if why := self._find_no_generation():
            return [refuse(member.slot, why)]
        # a rank that was not killed before may still be silent
        if self.active and not self._exits and member.lost_generation >= generation:
            silent = [other for other in self.members.values() if other.lost_generation < generation]
            self._set_due_silent(member, silent, now)
        return [SendToRank(member.slot, {"kind": "wait"})]

    def _find_no_generation(self) -> str:
        """Return why no other generation will begin; empty if one may, or if the ranks were asked to end."""
        if self.phase is ElasticPhase.ENDING:
            return ""
        if self.phase is ElasticPhase.GIVEN_UP:
            return "`phalanx run` has given the job up"
        if self.phase is ElasticPhase.FINISHED:
            return _HAS_ENDED
        strangers = [slot for slot, other in self.members.items() if not other.joined]
        if strangers and not self.generation.number:
            return f"{name_ranks(strangers)} never came to phalanx.elastic.run"
        return ""

    def _decide(self, now: float, without_loss: str = "") -> list[ElasticAction]:
        """Decide the consequences of the losses once no rank is about to end, so that one decision covers all."""
        if any(member.report is not None for member in self.members.values()):
            return []
        if not any(member.holds_state for member in self.members.values()):
            why = "no rank that is left holds the state of the training"
            said = Print(f"phalanx run: the job ends: {why}. Start again from a checkpoint.")
            return [*([said] if self.losses else []), *self._fail(why)]  # without earlier losses, the ranks report why
        if why := self._repetition.find_hopeless(self._exits, self.rank_of):
            return [Print(f"phalanx run: {why}"), *self._fail(why)]
        living = frozenset(self.members) | self._forking
        all_living = {host.member: living & frozenset(host.slots) for host in self.slot_plan.hosts}
        self.slot_plan = slot_plan = self.slot_plan.with_living(all_living, self.plan_refills(living))
        missing = slot_plan.find_missing(replace(self.limits, min_ranks=max(self.limits.min_ranks, self._min_ranks)))
        if missing:
            return self._end(missing, now)
        lost, self._newest = self._newest, []
        generation = plan_generation(self.generation.number + 1, slot_plan)
        if without_loss == ALL_LEFT:
            slot, error = next((slot, told.told[1]) for slot, told in self.members.items() if told.told is not None)
            without_loss = f"{ALL_LEFT} (rank {self.rank_of(slot)}: {error})"
        forked = {slot for part in generation.parts for slot in part.forked}
        self.num_replaced += len(forked)
        lost = [replace(each, replaced=each.slot in forked) for each in lost]
        self.losses += lost
        retired = tuple(slot for slot in self.generation.slots if slot not in generation.slots)
        self.generation = generation
        self._exits, self._gone = [], set()
        for member in self.members.values():
            member.told = None
        self._kill_nobody()
        holders = tuple(member.slot for member in self.members.values() if member.holds_state)
        self._forking |= forked
        return [
            Print(self._describe_loss(lost, forked, without_loss)),
            *([Retire(retired)] if retired else []),
            BeginGeneration(generation, holders, tuple(lost)),
        ]

    def _fail(self, why: str) -> list[ElasticAction]:
        """Fail the job because of the ranks that were lost; if none, because of the error that each rank left with."""
        told = [] if self._exits or self._gone else [refuse(member.slot, why) for member in self.members.values()]
        return [*told, self.give_up()]

    def silence_s(self, slot: int) -> float:
        """Return for how long the process in a slot may keep the others waiting."""
        return SILENT_RANK_S

    def plan_refills(self, living: frozenset[int]) -> dict[int, bool]:
        """Return, by host, whether its empty slots get a new process."""
        empty = sum(slot not in living for host in self.slot_plan.hosts for slot in host.slots)
        refills = self._may_replace(empty)
        return {host.member: refills for host in self.slot_plan.hosts}

    @property
    def _min_ranks(self) -> int:
        return max((member.min_ranks for member in self.members.values()), default=1)

    def _may_replace(self, count: int) -> bool:
        if self._refuses_forks:
            return False
        return self.max_replacements is None or self.num_replaced + count <= self.max_replacements

    def _end(self, missing: str, now: float) -> list[ElasticAction]:
        """End the job: too many ranks are missing, and none can be replaced."""
        allowed = "" if self._refuses_forks else f" (--max-restarts {self.max_replacements} are used up)"
        return self._save_and_end(f"there are {missing}, and no replacement can be made{allowed}")

    def _save_and_end(self, why: str) -> list[ElasticAction]:
        """End the job after the remaining ranks have saved their state."""
        self.losses += self._newest
        self._newest = []
        message = self._ending = {"kind": "end", "code": BELOW_MINIMUM_EXIT_CODE, "why": why}
        retired = tuple(slot for slot in self.generation.slots if slot not in {*self.members, *self._forking})
        self._exits = []
        self._over = ElasticPhase.ENDING
        return [
            Print(f"phalanx run: {why}: the ranks that are left save what they hold, and end"),
            *([Retire(retired)] if retired else []),
            *(SendToRank(slot, message) for slot, member in self.members.items() if member.joined),
        ]

    def _describe_loss(self, lost: list[LostRank], forked: set[int], without_loss: str) -> str:
        if not lost:
            return f"phalanx run: {without_loss or 'a process is missing'}: they form it again"
        replaced = "" if self.max_replacements is None else f"of {self.max_replacements}: {self.num_replaced}"
        return describe_loss(lost, len(forked), self.generation.world_size, replaced)

    def _forget(self, slot: int) -> None:
        self.members.pop(slot, None)
        self._plan_due()

    def _set_due(self, slot: int, at: float, why: str) -> None:
        self.members[slot].due = (at, why)
        self._plan_due()

    def _kill_nobody(self) -> None:
        """Cancel pending kills: silence counts anew from now on, or from the next generation on."""
        for member in self.members.values():
            member.due = None
        self._plan_due()

    def _plan_due(self) -> None:
        members = self.members.values()
        times = [
            *(member.due[0] for member in members if member.due is not None),
            *(member.abandon_at for member in members if member.abandon_at is not None),
        ]
        self.next_due = min(times, default=None)


def describe_loss(lost: Sequence[LostRank], num_forked: int, world_size: int, replaced: str) -> str:
    """Describe the lost ranks and the reaction: how many are forked, or how many remain.

    replaced: the number and the limit of replacements; empty without a limit.
    """
    said = [f"rank {each.rank} (pid {each.pid}) is lost: {each.why}" for each in lost]
    if not num_forked:
        then = f"{world_size} ranks go on without"
    else:
        left = f" ({replaced})" if replaced else ""
        then = f"A replacement is started{left}" if num_forked == 1 else f"{num_forked} are replaced{left}"
    return f"phalanx run: {'; '.join(said)}. {then}"


def describe_regrouped(lost: Sequence[LostRank], num_ranks: int, now: float) -> str:
    """Describe how many ranks continue, and how long after the loss."""
    return (
        f"phalanx run: {num_ranks} rank{'s' * (num_ranks > 1)} go{'es' * (num_ranks == 1)} on, "
        f"{now - min(each.at for each in lost):.2f} s after the loss"
    )


_MAX_IN_VAIN = 20  # the most losses in a row between which no step was completed
_MAX_DISAGREED = 3  # how often ranks may call different operations; once or twice a loss may be the reason
_MAX_ALIKE = 2  # how often the same exception may be raised at the same step


class Repetition:
    """`Repetition` counts losses since the last step that a rank has completed."""

    def __init__(self) -> None:
        self.best_step = -1
        self._losses = 0
        self._disagreements = 0
        self._disagreement = ""  # the last disagreement, as reported by a rank
        self._raised: dict[tuple[tuple[str, ...], str, int], int] = {}  # by exception and step: how often it was raised

    def on_step(self, step: int) -> None:
        if step > self.best_step:
            self.best_step = step
            self._losses = self._disagreements = 0
            self._raised = {key: times for key, times in self._raised.items() if key[2] >= step}

    def on_loss(self) -> None:
        """Note that a rank, a host or the group was lost."""
        self._losses += 1

    def on_disagreement(self, error: str) -> None:
        """Note that the group was lost because ranks called different operations."""
        self._disagreements += 1
        self._disagreement = error

    def find_repeated(self, reports: Mapping[int, ExceptionReport]) -> int | None:
        """Return the slot of `reports` whose exception was raised before, at the same step, if there is one."""
        alike = {
            (report.types, report.place): slot
            for slot, report in reports.items()
            if "PeerLostError" not in report.types
        }
        for (types, place), slot in alike.items():
            key = (types, place, self.best_step)
            self._raised[key] = self._raised.get(key, 0) + 1
            if self._raised[key] >= _MAX_ALIKE:
                return slot
        return None

    def find_hopeless(self, exits: Sequence[tuple[Exit, ExceptionReport | None]], rank_of: Callable[[int], int]) -> str:
        """Return why replacements of ranks that have ended so would not help; empty if they may."""
        reports = {exit.rank: report for exit, report in exits if report is not None}
        slot = self.find_repeated(reports)
        if slot is not None:
            return f"rank {rank_of(slot)} has raised the same as before at the same step, and is not replaced"
        return self.describe()

    def describe(self) -> str:
        """Return in words why the job does not get on; empty if it may."""
        if self._disagreements >= _MAX_DISAGREED:
            return f"the ranks have disagreed {self._disagreements} times at the same step: {self._disagreement}"
        if self._losses > _MAX_IN_VAIN:
            return f"{self._losses} ranks were lost in a row, and no step was completed in between"
        return ""
