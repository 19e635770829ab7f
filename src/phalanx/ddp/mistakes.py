"""Decide from all ranks' observations which mistakes the program makes.

rank 0   observes step 1, 2, 3  --.
rank 1   observes step 1, 2, 3  ---+--> decide_warnings --> log messages, each with the line of code to add
rank 2   observes step 1, 2, 3  --'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

NUM_STEPS = 3
"""The number of steps to watch: enough that equal batches are no coincidence, and few enough to cost little."""


DIFFERING_PARAMETERS = "differing parameters"


@dataclass(frozen=True)
class Observation:
    """An `Observation` has what a rank observed in a step, as integers for an all_gather: digests, flags, positions."""

    has_inputs: int = 0
    """1 if forward's input tensors could be read, and are not all empty."""
    inputs: int = 0
    """The digest of forward's input tensors."""
    draws: int = 0
    """1 if forward drew from torch's generator."""
    generator: int = 0
    """The digest of the generator's state before forward."""
    parameters: int = 0
    """The digest of all parameters after backward, before the optimizer's step."""
    nan_output: int = 0
    """1 if an output of forward was NaN."""
    nan_gradient: int = 0
    """The position, from 1, of the first parameter whose own gradient was NaN; 0 if there was none."""
    stale_optimizer: int = 0
    """1 if an optimizer stepped tensors of the parameters' shapes, and none stepped the wrapped parameters."""
    stepped: int = 0
    """The digest of all parameters just before the optimizer step, if they differed between ranks in backward; or 0."""

    def row(self) -> list[int]:
        """Return the numbers, in the order of the fields."""
        return list(dataclasses.astuple(self))


StepObservations = Sequence[Observation]
"""The observations of one step, by rank."""


@dataclass(frozen=True)
class Mistake:
    """A `Mistake` is one finding; each `kind` is logged once."""

    kind: str
    text: str


def decide_warnings(
    steps: Sequence[StepObservations], names: Sequence[str], differing: Sequence[int] = ()
) -> list[Mistake]:
    """Return the warnings to log after the last of `steps`.

    Arguments:
        names: the parameters' names; `Observation.nan_gradient` is a position in this list.
        differing: positions of the parameters whose values differ between ranks in the latest step.
    """
    latest, number = steps[-1], len(steps)
    if len(latest) < 2:
        return []
    found = [
        _differing_parameters(latest, number, names, differing),
        _nan_on_some(latest, number, names),
        _equal_draws(latest),
    ]
    if number == NUM_STEPS:
        found += [_equal_batches(steps), _stale_optimizer(latest)]
    return [mistake for mistake in found if mistake is not None]


def parameters_were_restored(latest: StepObservations) -> bool:
    """Return whether all ranks had the same parameters at the optimizer step, although they differed in backward.

    Some methods, such as sharpness-aware minimization, change the parameters for one backward and then restore them.
    """
    return latest[0].stepped != 0 and len({one.stepped for one in latest}) == 1


def _equal_batches(steps: Sequence[StepObservations]) -> Mistake | None:
    ranks = range(len(steps[0]))
    seen = {
        rank: tuple(step[rank].inputs for step in steps)
        for rank in ranks
        if all(step[rank].has_inputs for step in steps)
    }
    alike = _alike(seen)
    if not alike:
        return None
    return Mistake(
        "equal batches",
        f"{_list_groups(alike, len(ranks))} were given the same batch in each of the first {len(steps)} steps, so they "
        "repeat the same work. Give each rank its part of the data: "
        "DataLoader(dataset, sampler=phalanx.DistributedSampler(dataset), ...)",
    )


def _equal_draws(latest: StepObservations) -> Mistake | None:
    alike = _alike({rank: one.generator for rank, one in enumerate(latest) if one.draws})
    if not alike:
        return None
    return Mistake(
        "equal draws",
        f"{_list_groups(alike, len(latest))} draw the same random numbers in forward, so dropout and other random "
        "layers do the same on each of them. After the model is built, seed by rank: "
        "torch.manual_seed(seed + torch.distributed.get_rank())",
    )


def _differing_parameters(
    latest: StepObservations, number: int, names: Sequence[str], differing: Sequence[int]
) -> Mistake | None:
    if not differing:
        return None
    others = [str(rank) for rank, one in enumerate(latest) if one.parameters != latest[0].parameters]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return Mistake(
        DIFFERING_PARAMETERS,
        f"in step {number} parameter {names[differing[0]]!r}{more} had different values on {_ranks(others)} than on "
        "rank 0: gradients are averaged, but the ranks train different models. Change parameters in the same way on "
        "every rank, and load checkpoints before wrapping the model. To see by how much they differ: "
        "phalanx.check_replicas(model)",
    )


def _nan_on_some(latest: StepObservations, number: int, names: Sequence[str]) -> Mistake | None:
    outputs = [rank for rank, one in enumerate(latest) if one.nan_output]
    gradients = {rank: one.nan_gradient for rank, one in enumerate(latest) if one.nan_gradient}
    broken = sorted({*outputs, *gradients})
    if not 0 < len(broken) < len(latest):  # a NaN on all ranks is a problem with the model, not with one rank's data
        return None
    if outputs:
        what, where = "the output of forward", outputs
    else:
        what, where = f"the gradient of {names[gradients[broken[0]] - 1]!r}", broken
    return Mistake(
        "NaN on some ranks",
        f"in step {number} {what} was NaN on {_ranks([str(rank) for rank in where])} only; the mean over ranks is then "
        f"NaN on all of them. Look at that rank's data first: if torch.distributed.get_rank() == {where[0]}: "
        "assert all(torch.isfinite(tensor).all() for tensor in batch)",
    )


def _stale_optimizer(latest: StepObservations) -> Mistake | None:
    stale = [str(rank) for rank, one in enumerate(latest) if one.stale_optimizer]
    if not stale:
        return None
    return Mistake(
        "stale optimizer",
        f"the optimizer of {_ranks(stale)} holds none of the model's parameters, only tensors of the same shapes that "
        "get no gradient: it was built from another copy of the model, and trains nothing. Build it last: "
        "optimizer = torch.optim.AdamW(model.parameters(), ...) after model = DistributedDataParallel(model)",
    )


def _alike(values: Mapping[int, Hashable]) -> list[list[int]]:
    """Return the groups of two or more ranks that have the same value."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _list_groups(groups: list[list[int]], world_size: int) -> str:
    if len(groups[0]) == world_size:
        return f"all {world_size} ranks"
    return "; ".join(_ranks([str(rank) for rank in group]) for group in groups)


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"
