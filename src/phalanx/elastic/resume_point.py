"""Decide from which step a new generation resumes, and which rank sends its state to which; a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankState:
    """A `RankState` is a rank's report on its state when a generation forms its group.

    `number` counts commits; -1 for a rank that has just started. `is_whole`: parameters and optimizer are as they were
    at that commit; else the rank was between the update and its commit, or in the middle of a transfer. `has_stepped`:
    the rank had made the next step's update, and only its commit is missing. `was_rank` is its rank in the generation
    whose records it has, -1 for none.
    """

    number: int
    is_whole: bool
    has_stepped: bool
    was_rank: int
    records_of: int = -1
    """The generation whose records this rank can read; -1 for none."""
    reads: tuple[int, ...] = ()
    """The ranks of this rank's host, in that generation, whose records it can read."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The groups, by name and members, that the rank's script has made before `elastic.run`."""
    differs: bool = False
    """Whether ranks differ in their small state, so that each must get its own back."""
    form: str = ""
    """The function that the rank runs, and the names and kinds of its State's objects; the same on all ranks."""
    progress: tuple[int, bool] = (0, False)
    """How many updates the rank has made since that commit, and whether it was in the next commit, if `has_stepped`."""


@dataclass(frozen=True)
class ResumePoint:
    """A `ResumePoint` is the step to resume from.

    `source` sends its state of that step to `receivers`; the other ranks have it. With `is_ahead` no rank has committed
    the step, but ranks have made its update: it counts as done, as far as `source` has got in it.
    """

    number: int
    source: int
    receivers: tuple[int, ...]
    is_ahead: bool = False


def describe_differing(rank_states: Sequence[RankState]) -> str:
    """Describe the first rank whose function or State differs from rank 0's; return "" if there is none."""
    first = rank_states[0].form
    for rank, one in enumerate(rank_states):
        if one.form != first:
            return f"rank {rank} has {one.form}, rank 0 has {first}"
    return ""


def decide(rank_states: Sequence[RankState], *, apart: bool = False) -> ResumePoint | None:
    """Return the point from which the ranks resume; None if no rank holds a whole state.

    `apart`: the ranks train apart (LocalSGD, DiLoCo), so each resumes from its own step, and only new ranks receive.

    The point is the last step that a rank has completed, if that rank still holds its state. Ranks differ by one step
    at most: a rank that updates has the gradients of all ranks. In a step that no rank has committed, they may differ
    in what they have done since the first update (further updates, a scheduler's step, values): all resume from the
    rank that is farthest.
    """
    if apart:
        old = [rank for rank, one in enumerate(rank_states) if one.number >= 0 and (one.is_whole or one.has_stepped)]
        new = tuple(rank for rank in range(len(rank_states)) if rank not in old)
        return ResumePoint(rank_states[old[0]].number, old[0], new) if old else None
    whole = [rank for rank, one in enumerate(rank_states) if one.is_whole and one.number >= 0]
    if whole:
        number = max(rank_states[rank].number for rank in whole)
        holders = [rank for rank in whole if rank_states[rank].number == number]
        return ResumePoint(number, holders[0], tuple(r for r in range(len(rank_states)) if r not in holders))
    ahead = [rank for rank, one in enumerate(rank_states) if one.has_stepped and one.number >= 0]
    if not ahead:
        return None
    number = max(rank_states[rank].number for rank in ahead) + 1
    holders = [rank for rank in ahead if rank_states[rank].number == number - 1]
    most = max(rank_states[rank].progress for rank in holders)
    holders = [rank for rank in holders if rank_states[rank].progress == most]
    _, is_committing = most
    if not is_committing:  # they may have done more than the update, but not all of the step
        holders = holders[:1]
    return ResumePoint(number, holders[0], tuple(r for r in range(len(rank_states)) if r not in holders), is_ahead=True)
