"""Simulate a schedule, given the cost of each action: when actions begin and end, and how long ranks are idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.pipeline.schedule import Action, PipelineSchedule


@dataclass(frozen=True)
class Span:
    """A `Span` is an action with its begin and end, in seconds."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A `Timeline` has the spans of every rank: `ranks[r]` is in time order."""

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
        """Return the seconds for which a rank works."""
        return sum(span.end - span.begin for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Return the fraction of the ranks' total time in which they are idle."""
        total = self.seconds * len(self.ranks)
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / total if total else 0.0


def depends_on(action: Action, schedule: PipelineSchedule) -> Sequence[Action]:
    """Return the actions that must end before `action` can begin, besides the earlier actions of its rank."""
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
    """Return the costs for `simulate` if all stages are equal and a backward takes `backward` times a forward.

    The forwards of a micro-batch through all stages of a rank together take one second.
    """
    share = schedule.num_ranks / schedule.num_stages
    of: Mapping[str, float] = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
    return lambda action: of[action.kind] * share


def ideal_efficiency(num_ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return m / (m + (p - 1) / v), the fraction of time in which ranks are busy if all stages are equal."""
    return micro_batches / (micro_batches + (num_ranks - 1) / stages_per_rank)
