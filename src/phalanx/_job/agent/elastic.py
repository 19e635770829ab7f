"""`Elastic` decides how an elastic job continues when a rank is lost. It uses no clock, process or socket.

    STARTING    all ranks have joined ──────────────▶ TRAINING
    TRAINING    a rank is lost ─────────────────────▶ LOSING
                a host joins, or leaves cleanly ────▶ REGROUPING
    LOSING      all failing ranks have exited ──────▶ REGROUPING
                too few are left ───────────────────▶ WAITING
    WAITING     enough hosts have joined ───────────▶ REGROUPING
                no host joins in time ──────────────▶ ENDING: the ranks save, and exit
    REGROUPING  every rank is in the new group ─────▶ TRAINING
                another rank is lost ───────────────▶ LOSING
    any phase   a rank finishes its training ───────▶ FINISHED: an ordinary job from now on
                no rank has the state, or replacements would not help ──▶ GIVEN_UP: an ordinary failure

A process is identified by its slot, the rank it was started with (`agent.generation`), and its pid; a replacement has
the slot of the process that it replaces, and another pid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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

BELOW_MINIMUM_EXIT_CODE = 75  # EX_TEMPFAIL: a scheduler may restart the job
ALL_LEFT = "all ranks have left their group"
_HAS_ENDED = "another rank has finished training"


class ElasticPhase(Enum):
    """An `ElasticPhase` is a state of an elastic job, drawn in the module's docstring."""

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
    """An `ElasticRank` is a process in a slot.

    `holds_state`: the process has the training state, from which others can continue. `generation`: the newest
    generation that the process has joined.
    """

    slot: int
    pid: int
    joined: bool = False
    holds_state: bool = False
    outlives: bool = False  # whether it survives the death of its zygote
    generation: int = 0
    step: int = -1
    min_ranks: int = 1
    wait_s: float = 0.0
    lost_generation: int = -1  # the latest generation that it has left after an error
    report: ExceptionReport | None = None  # its exception, if it is about to exit
    loss_report: tuple[bool, str] | None = None  # why it left its group: whether the ranks disagreed, and its error
    due: tuple[float, str] | None = None  # when to kill it, and why
    evicted: str = ""  # why it was killed; it has not exited yet
    abandon_at: float | None = None  # when the job continues even if the killed process has not exited
    continued: bool = False  # it was sent SIGCONT instead of being killed


class Elastic:
    """`Elastic` makes the decisions for an elastic job. Its `on_…` methods take events, and may return actions."""

    def __init__(self, slot_plan: SlotPlan, max_replacements: int | None = None, limits: Limits | None = None) -> None:
        self.slot_plan = slot_plan
        self.limits = limits or Limits()
        self.max_replacements = max_replacements
        self.members: dict[int, ElasticRank] = {}
        self.generation = plan_generation(0, slot_plan)
        self.losses: list[LostRank] = []
        self.num_replaced = 0
        self.has_trained = False  # a rank has reported that it has finished training
        self.finished = False  # a rank has finished its training, or has exited with success
        self._has_committed = False  # a rank has committed a step
        self._over: ElasticPhase | None = None  # ENDING or GIVEN_UP, once decided
        self._newest_never_forms = False  # ranks finished in the previous generation, so the newest will never form
        self.is_script_elastic = False  # according to its source; the ranks confirm it later
        self.began_at = 0.0
        self._has_joined = False  # a rank has reached its first `elastic.run`
        self._killed_early_at: float | None = None  # when a rank was killed before all had joined
        self._end_message: dict[str, Any] = {}  # the message that asks the ranks to save and exit
        self.next_due: float | None = None
        self._exits: list[tuple[Exit, ExceptionReport | None]] = []  # losses since the last generation began
        self._undecided_losses: list[LostRank] = []  # the same losses, for messages
        self._lost_slots: set[int] = set()  # slots lost with their host since the last generation began
        self._refuses_forks = False  # whether the system has refused to fork
        self._forking: set[int] = set()  # slots whose process was requested but has not started
        self._repetition = Repetition()

    @property
    def phase(self) -> ElasticPhase:
        if self._over is not None:
            return self._over
        if self.finished:
            return ElasticPhase.FINISHED
        if self._exits or self._lost_slots:
            return ElasticPhase.LOSING
        if not self.generation.number:
            return ElasticPhase.TRAINING if self._all_have_joined else ElasticPhase.STARTING
        return ElasticPhase.TRAINING if self.is_regrouped else ElasticPhase.REGROUPING

    @property
    def _all_have_joined(self) -> bool:
        """Return whether every started process has reached `elastic.run`; a replacement may still be starting."""
        return (
            any(member.joined for member in self.members.values())
            and len({*self.members, *self._forking, *self._lost_slots}) + len(self._exits) >= self.generation.world_size
            and all(member.joined or self.generation.number for member in self.members.values())
        )

    @property
    def active(self) -> bool:
        """Return whether the job would survive a loss."""
        return self.phase not in OVER and self._all_have_joined

    @property
    def is_regrouped(self) -> bool:
        """Return whether all ranks have joined the newest generation, and none is still being forked."""
        number = self.generation.number
        return not self._forking and all(member.generation == number for member in self.members.values())

    @property
    def step(self) -> int:
        """Return the newest step that any rank is known to have completed or started from; -1 if none is known."""
        return self._repetition.best_step

    def on_commit(self, step: int) -> None:
        """Record the last step that a rank has committed."""
        self._has_committed = True
        self._repetition.on_step(step)

    def rank_of(self, slot: int) -> int:
        """Return the rank of a slot in the current generation; `slot` itself if it has none."""
        slots = self.generation.slots
        return slots.index(slot) if slot in slots else slot

    def on_started(self, slot: int, pid: int) -> None:
        """Record the process that was forked for a slot."""
        self.members[slot] = ElasticRank(slot, pid)
        self._forking.discard(slot)

    def on_message(self, slot: int, pid: int, message: Mapping[str, Any], now: float) -> list[ElasticAction]:
        """Process a message from a rank; ignore an invalid message."""
        member = self.members.get(slot)
        if member is None or member.pid != pid:
            return []
        kind = message.get("kind")
        generation = read_int(message.get("generation"), 0)
        step = read_int(message.get("step"), -1)
        if step > member.step:
            member.step = step
        if kind in ("lost", "failed"):
            self._repetition.on_step(step)
        if kind == "elastic":
            return self._on_joined(member, message)
        if kind == "outlives":
            member.outlives = True
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

    def survives_loss_of(self, slot: int, pid: int) -> bool:
        """Return whether the job survives the loss of this process."""
        member = self.members.get(slot)
        return member is not None and member.pid == pid and self.active

    def on_report(self, report: ExceptionReport, now: float) -> list[ElasticAction] | None:
        """Process the uncaught exception of a rank, which is about to exit; return None if the job fails with it."""
        if not self.survives_loss_of(report.rank, report.pid):
            return None
        self.members[report.rank].report = report
        self._set_due(report.rank, now + ENDING_S, f"it did not exit within {ENDING_S:g} s of its exception")
        return []

    def on_exit(self, exit: Exit, now: float) -> list[ElasticAction] | None:
        """Process the exit of a rank; return None unless it is a loss that the job survives."""
        member = self.members.get(exit.rank)
        if member is None or member.pid != exit.pid:
            return None
        if exit.is_orderly and member.report is None:
            self._finish(member)
        if not self.active:
            self.record_early_loss(exit)
            self._forget(exit.rank)
            return None
        self._forget(exit.rank)
        self._exits.append((exit, member.report))
        why = member.evicted or summarise(RankFailure(exit.rank, member.report, exit))
        step = max(self.step, member.step)
        lost = LostRank(exit.rank, self.rank_of(exit.rank), exit.pid, why, exit.at, self.generation.number, step)
        self._undecided_losses.append(lost)
        self._repetition.on_loss()
        return self._decide(now)

    @property
    def lost_early(self) -> bool:
        """Return whether a rank of an elastic script was killed before all had reached `elastic.run`.

        A script may mention `elastic.run` without calling it, so its source is trusted only for the first `STARTING_S`.
        """
        if self._killed_early_at is None:
            return False
        return self._has_joined or (self.is_script_elastic and self._killed_early_at - self.began_at < STARTING_S)

    def record_early_loss(self, exit: Exit) -> None:
        """Record that a signal killed a process before all ranks had reached their first `elastic.run`."""
        member = self.members.get(exit.rank)
        if member is None or member.pid != exit.pid or exit.status >= 0 or member.report is not None:
            return
        if self.phase is ElasticPhase.STARTING and not self._has_committed:
            self._killed_early_at = exit.at

    def on_unforked(self, slot: int, why: str, now: float) -> list[ElasticAction] | None:
        """Process the system's refusal to fork a replacement; return None if `slot` needs no replacement."""
        if not self.generation.number or slot in self.members:
            return None
        self._refuses_forks = True
        self._forking.discard(slot)
        return [Print(f"phalanx run: rank {self.rank_of(slot)} could not be replaced: {why}"), *self._decide(now)]

    @property
    def forking(self) -> tuple[int, ...]:
        """Return the slots whose process was requested but has not started."""
        return tuple(sorted(self._forking))

    def on_no_forks(self, now: float) -> list[ElasticAction]:
        """Record that no more processes can be forked."""
        self._refuses_forks = True
        missing, self._forking = self._forking, set()
        return self._decide(now) if missing else []

    def on_time(self, now: float) -> list[ElasticAction]:
        """Return the actions that are due; the agent calls this at `next_due`."""
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
        """Kill the process in a slot; its exit is processed like any other loss.

        The only process with the training state is first sent SIGCONT instead, in case it was stopped.
        """
        member = self.members.get(slot)
        if member is None:
            return []
        others = [other for other in self.members.values() if other is not member and other.holds_state]
        if member.holds_state and member.report is None and not others and not member.continued:
            member.continued = True
            said = "no other rank has the training state: sending it SIGCONT instead of killing it"
            return [Print(f"phalanx run: rank {self.rank_of(slot)} (pid {member.pid}): {said}"), Continue(slot)]
        if member.report is None:
            member.evicted = f"killed: {why}"
        if member.abandon_at is None:
            member.abandon_at = now + DYING_S
        self._plan_due()
        return [Evict(slot, why)]

    def is_evicted(self, pid: int) -> bool:
        """Return whether this process was killed because it made the others wait, and has not exited yet."""
        return any(member.pid == pid and member.evicted for member in self.members.values())

    def give_up(self) -> GiveUp:
        """Treat the losses since the last generation, and all later ones, as ordinary failures."""
        self._over = self._over or ElasticPhase.GIVEN_UP
        self._cancel_kills()
        exits, self._exits = self._exits, []
        return GiveUp(tuple(e for e, _ in exits), tuple(r for _, r in exits if r is not None))

    def _finish(self, finisher: ElasticRank) -> list[ElasticAction]:
        """Continue as an ordinary job, and refuse ranks that wait for a generation."""
        self.finished = True
        self._cancel_kills()
        if self.phase is ElasticPhase.ENDING:
            return []
        members = self.members.values()
        actions: list[ElasticAction] = [
            refuse(member.slot, _HAS_ENDED) for member in members if member.lost_generation >= self.generation.number
        ]
        if finisher.generation < self.generation.number and not self._newest_never_forms:
            self._newest_never_forms = True
            late = [member for member in members if member.joined and not member.holds_state]
            actions += [action for member in late for action in self._reject(member)]
        return actions

    def _reject(self, member: ElasticRank) -> list[ElasticAction]:
        """Refuse a rank that waits for a generation that will never form.

        A newly added rank leaves. A replacement fails, as the rank that it replaces did.
        """
        if any(lost.slot == member.slot for lost in self._last_losses):
            return [refuse(member.slot, _HAS_ENDED)]
        said = f"phalanx run: rank {self.rank_of(member.slot)} leaves: it joined after the training had ended"
        return [Print(said), SendToRank(member.slot, LEAVE)]

    def _on_joined(self, member: ElasticRank, message: Mapping[str, Any]) -> list[ElasticAction]:
        member.joined = self._has_joined = True
        member.min_ranks = read_int(message.get("min_ranks"), 1)
        if not self.generation.number:
            member.holds_state = True
        wait_s = message.get("wait_s")
        member.wait_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0
        if self.phase is ElasticPhase.ENDING:  # the others have already received this message
            return [SendToRank(member.slot, self._end_message)]
        if self._newest_never_forms and not member.holds_state:
            return self._reject(member)
        return [SendGeneration(member.slot)] if self.generation.number and not self._exits else []

    def _on_regrouped(self, member: ElasticRank, generation: int, now: float) -> list[ElasticAction]:
        member.generation = generation
        member.holds_state = True
        if generation != self.generation.number or self._exits or not self.is_regrouped:
            return []
        if self.phase is ElasticPhase.GIVEN_UP:
            return []
        lost = self._last_losses
        return [Print(describe_regrouped(lost, len(self.members), now))] if lost else []

    @property
    def _last_losses(self) -> tuple[LostRank, ...]:
        number = self.generation.number
        return tuple(lost for lost in self.losses if lost.generation == number - 1)

    def _on_reported_loss(
        self, member: ElasticRank, generation: int, report: tuple[bool, str], now: float
    ) -> list[ElasticAction]:
        """Process a rank's report that it has left its group after an error.

        If no process has exited, regroup once all ranks have left; kill a rank that does not leave in time.
        """
        member.lost_generation = max(member.lost_generation, generation)
        if why := self._find_no_generation():
            return [refuse(member.slot, why)]
        if generation != self.generation.number or self._exits or not self.active:
            return []
        member.loss_report = member.loss_report or report
        silent = [other for other in self.members.values() if other.lost_generation < generation]
        if not silent:
            self._repetition.on_loss()
            all_reports = [other.loss_report for other in self.members.values() if other.loss_report is not None]
            if disagreement := next((error for disagrees, error in all_reports if disagrees), ""):
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
                why = f"rank {self.rank_of(member.slot)} left their group, but this rank did not within {span_s:g} s"
                self._set_due(other.slot, now + span_s, why)

    def _on_waiting(self, member: ElasticRank, generation: int, now: float) -> list[ElasticAction]:
        """Answer a rank that waits for the generation after `generation`: send it, ask the rank to wait, or refuse."""
        if generation < self.generation.number and not self._exits:
            return [SendGeneration(member.slot)]
        if why := self._find_no_generation():
            return [refuse(member.slot, why)]
        # a rank that was sent SIGCONT instead of being killed may still be silent
        if self.active and not self._exits and member.lost_generation >= generation:
            silent = [other for other in self.members.values() if other.lost_generation < generation]
            self._set_due_silent(member, silent, now)
        return [SendToRank(member.slot, {"kind": "wait"})]

    def _find_no_generation(self) -> str:
        """Return why no further generation will begin; empty if one may begin, or if the ranks were asked to exit."""
        if self.phase is ElasticPhase.ENDING:
            return ""
        if self.phase is ElasticPhase.GIVEN_UP:
            return "`phalanx run` has abandoned the job"
        if self.phase is ElasticPhase.FINISHED:
            return _HAS_ENDED
        absent = [slot for slot, other in self.members.items() if not other.joined]
        if absent and not self.generation.number:
            return f"{name_ranks(absent)} never called phalanx.elastic.run"
        return ""

    def _decide(self, now: float, without_loss: str = "") -> list[ElasticAction]:
        """Decide how to continue, once no rank is about to exit, so that one decision covers all losses."""
        if any(member.report is not None for member in self.members.values()):
            return []
        if not any(member.holds_state for member in self.members.values()):
            why = "no remaining rank has the training state"
            said = Print(f"phalanx run: the job ends: {why}. Start again from a checkpoint.")
            return [*([said] if self.losses else []), *self._fail(why)]  # without earlier losses, the ranks report why
        if why := self._repetition.find_futile(self._exits, self.rank_of):
            return [Print(f"phalanx run: {why}"), *self._fail(why)]
        living = frozenset(self.members) | self._forking
        all_living = {host.member: living & frozenset(host.slots) for host in self.slot_plan.hosts}
        self.slot_plan = slot_plan = self.slot_plan.with_living(all_living, self.plan_refills(living))
        missing = slot_plan.find_missing(replace(self.limits, min_ranks=max(self.limits.min_ranks, self._min_ranks)))
        if missing:
            return self._end(missing, now)
        lost, self._undecided_losses = self._undecided_losses, []
        generation = plan_generation(self.generation.number + 1, slot_plan)
        if without_loss == ALL_LEFT:
            slot, error = next(
                (slot, each.loss_report[1]) for slot, each in self.members.items() if each.loss_report is not None
            )
            without_loss = f"{ALL_LEFT} (rank {self.rank_of(slot)}: {error})"
        forked = {slot for part in generation.parts for slot in part.forked}
        self.num_replaced += len(forked)
        lost = [replace(each, replaced=each.slot in forked) for each in lost]
        self.losses += lost
        retired = tuple(slot for slot in self.generation.slots if slot not in generation.slots)
        self.generation = generation
        self._exits, self._lost_slots = [], set()
        for member in self.members.values():
            member.loss_report = None
        self._cancel_kills()
        holders = tuple(member.slot for member in self.members.values() if member.holds_state)
        self._forking |= forked
        return [
            Print(self._describe_loss(lost, forked, without_loss)),
            *([Retire(retired)] if retired else []),
            BeginGeneration(generation, holders, tuple(lost)),
        ]

    def _fail(self, why: str) -> list[ElasticAction]:
        """Fail the job because of the lost ranks or, if none is lost, because of the errors that ended their group."""
        refusals = (
            [] if self._exits or self._lost_slots else [refuse(member.slot, why) for member in self.members.values()]
        )
        return [*refusals, self.give_up()]

    def silence_s(self, slot: int) -> float:
        """Return how many seconds the process in a slot may make the others wait."""
        return SILENT_RANK_S

    def plan_refills(self, living: frozenset[int]) -> dict[int, bool]:
        """Return, by the host's member number, whether the empty slots of each host get new processes."""
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
        allowed = "" if self._refuses_forks else f" (--max-restarts {self.max_replacements} is used up)"
        return self._save_and_end(f"only {missing} are left, and no rank can be replaced{allowed}")

    def _save_and_end(self, why: str) -> list[ElasticAction]:
        """End the job: ask the remaining ranks to save their state and exit."""
        self.losses += self._undecided_losses
        self._undecided_losses = []
        message = self._end_message = {"kind": "end", "code": BELOW_MINIMUM_EXIT_CODE, "why": why}
        retired = tuple(slot for slot in self.generation.slots if slot not in {*self.members, *self._forking})
        self._exits = []
        self._over = ElasticPhase.ENDING
        return [
            Print(f"phalanx run: {why}: the remaining ranks save their state, and exit"),
            *([Retire(retired)] if retired else []),
            *(SendToRank(slot, message) for slot, member in self.members.items() if member.joined),
        ]

    def _describe_loss(self, lost: list[LostRank], forked: set[int], without_loss: str) -> str:
        if not lost:
            return f"phalanx run: {without_loss or 'a process is missing'}: the ranks form a new group"
        replaced = "" if self.max_replacements is None else f"{self.num_replaced} of {self.max_replacements}"
        return describe_loss(lost, len(forked), self.generation.world_size, replaced)

    def _forget(self, slot: int) -> None:
        self.members.pop(slot, None)
        self._plan_due()

    def _set_due(self, slot: int, at: float, why: str) -> None:
        self.members[slot].due = (at, why)
        self._plan_due()

    def _cancel_kills(self) -> None:
        """Cancel pending kills: the time limits start again, now or with the next generation."""
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
    """Describe the lost ranks, and how many are replaced or remain.

    `replaced`: the number of replacements so far and the limit, such as `2 of 3`; empty without a limit.
    """
    said = [f"rank {each.rank} (pid {each.pid}) is lost: {each.why}" for each in lost]
    if not num_forked:
        count = f"{world_size} rank{'s' * (world_size != 1)} continue{'s' * (world_size == 1)}"
        then = f"{count} without {'it' if len(lost) == 1 else 'them'}"
    else:
        left = f" ({replaced})" if replaced else ""
        then = f"Starting a replacement{left}" if num_forked == 1 else f"Starting {num_forked} replacements{left}"
    return f"phalanx run: {'; '.join(said)}. {then}"


def describe_regrouped(lost: Sequence[LostRank], num_ranks: int, now: float) -> str:
    """Return a line with the number of ranks that continue and the time since the loss."""
    return (
        f"phalanx run: {num_ranks} rank{'s' * (num_ranks > 1)} continue{'s' * (num_ranks == 1)}, "
        f"{now - min(each.at for each in lost):.2f} s after the loss"
    )


_MAX_WITHOUT_STEP = 20  # maximum number of losses without a completed step in between
_MAX_DISAGREEMENTS = 3  # the job fails when ranks call different operations this often; a loss may cause one or two
_MAX_REPEATED = 2  # the job fails when the same exception is raised this often at the same step


class Repetition:
    """`Repetition` counts losses since the last completed step, to detect a job that makes no progress."""

    def __init__(self) -> None:
        self.best_step = -1
        self._losses = 0
        self._disagreements = 0
        self._disagreement = ""  # the last disagreement, as reported by a rank
        self._raised: dict[tuple[tuple[str, ...], str, int], int] = {}  # by types, place and step: how often raised

    def on_step(self, step: int) -> None:
        if step > self.best_step:
            self.best_step = step
            self._losses = self._disagreements = 0
            self._raised = {key: times for key, times in self._raised.items() if key[2] >= step}

    def on_loss(self) -> None:
        """Count the loss of a rank, of a host or of the whole group."""
        self._losses += 1

    def on_disagreement(self, error: str) -> None:
        """Count a disagreement: the ranks left their group because they had called different operations."""
        self._disagreements += 1
        self._disagreement = error

    def find_repeated(self, reports: Mapping[int, ExceptionReport]) -> int | None:
        """Count the exceptions in `reports`; return a slot whose exception was raised before at this step, or None."""
        alike = {
            (report.types, report.place): slot
            for slot, report in reports.items()
            if "PeerLostError" not in report.types
        }
        for (types, place), slot in alike.items():
            key = (types, place, self.best_step)
            self._raised[key] = self._raised.get(key, 0) + 1
            if self._raised[key] >= _MAX_REPEATED:
                return slot
        return None

    def find_futile(self, exits: Sequence[tuple[Exit, ExceptionReport | None]], rank_of: Callable[[int], int]) -> str:
        """Return why replacing the ranks that exited would not help; empty if it may help."""
        reports = {exit.rank: report for exit, report in exits if report is not None}
        slot = self.find_repeated(reports)
        if slot is not None:
            return f"rank {rank_of(slot)} has raised the same exception at the same step again, and is not replaced"
        return self.describe()

    def describe(self) -> str:
        """Return why the job makes no progress; empty if it may still make some."""
        if self._disagreements >= _MAX_DISAGREEMENTS:
            return f"the ranks have disagreed {self._disagreements} times at the same step: {self._disagreement}"
        if self._losses > _MAX_WITHOUT_STEP:
            return f"{self._losses} ranks were lost without a completed step between the losses"
        return ""
