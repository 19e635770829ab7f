"""Simulate a schedule with the costs of its stages: when each action begins and ends, and how long ranks wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.pipeline.schedule import Action, PipelineSchedule


@dataclass(frozen=True)
class Span:
    """A `Span` is an action and its time."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A `Timeline` has every rank's actions with their times. `ranks[r]` is in the order of time."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def begin(self) -> float:
        """Return when the first action begins."""
        return min((spans[0].begin for spans in self.ranks if spans), default=0.0)

    @property
    def end(self) -> float:
        """Return when the last action ends."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def seconds(self) -> float:
        """Return the seconds from the beginning of the first action to the end of the last."""
        return self.end - self.begin

    def busy(self, rank: int) -> float:
        """Return how long a rank worked."""
        return sum(span.end - span.begin for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Return the share of all ranks' time in which they were idle."""
        total = self.seconds * len(self.ranks)
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / total if total else 0.0


def depends_on(action: Action, schedule: PipelineSchedule) -> Sequence[Action]:
    """Return the actions that must end before an action can begin, besides its rank's earlier actions."""
    kind, stage, i = action
    split = schedule.name == "zero_bubble"
    if kind == "F":
        return [Action("F", stage - 1, i)] if stage else []
    if kind == "W":
        return [Action("I", stage, i)]
    if stage == schedule.num_stages - 1:
        return [Action("F", stage, i)]
    return [Action("I" if split else "B", stage + 1, i)]


def simulate(schedule: PipelineSchedule, seconds: Callable[[Action], float]) -> Timeline:
    """Return the times of all actions if every action takes `seconds(action)`.

    Raises:
        ValueError: the orders of the ranks deadlock.
    """
    ended: dict[Action, float] = {}
    ranks: list[list[Span]] = [[] for _ in schedule.orders]
    at = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                needs = depends_on(action, schedule)
                if any(need not in ended for need in needs):
                    break
                begin = ranks[rank][-1].end if ranks[rank] else 0.0
                begin = max([begin, *(ended[need] for need in needs)])
                end = begin + seconds(action)
                ended[action] = end
                ranks[rank].append(Span(action, begin, end))
                at[rank] += 1
                progress = True
    if any(at[rank] < len(order) for rank, order in enumerate(schedule.orders)):
        waiting = ", ".join(f"rank {r} at {o[at[r]]}" for r, o in enumerate(schedule.orders) if at[r] < len(o))
        raise ValueError(f"the schedule waits for itself: {waiting}")
    return Timeline(tuple(map(tuple, ranks)))


def unit_seconds(schedule: PipelineSchedule, backward: float = 2.0) -> Callable[[Action], float]:
    """Return a function of an action's seconds, for equal stages whose backward takes `backward` times their forward.

    The forward takes one second for all stages of a rank together.
    """
    share = schedule.num_ranks / schedule.num_stages
    of: Mapping[str, float] = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
    return lambda action: of[action.kind] * share


def ideal_efficiency(num_ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return m / (m + (p - 1) / v), the share of time in which ranks are busy if all stages take the same time."""
    return micro_batches / (micro_batches + (num_ranks - 1) / stages_per_rank)
