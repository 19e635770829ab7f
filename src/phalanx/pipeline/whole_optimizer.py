"""Convert the states of the stages' optimizers to the state of one optimizer of the whole model, and back.

The functions are pure. Parameters are identified by their names in the whole model. A whole state is the `state_dict()`
of a plain optimizer whose groups list the parameters in the order of the model, with their names (torch's
"param_names").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx._base.param_groups import find_misshapen, options_of

Layout = list[list[str]]
_SHOWN = 4


@dataclass
class ParamGroup:
    """A `ParamGroup` has the options of a parameter group, and the names of its parameters.

    The placeholder of a rank without parameters has the name "".
    """

    options: dict[str, Any]
    names: list[str] = field(default_factory=list)


def merge_groups(by_rank: Sequence[Sequence[ParamGroup]], order: Mapping[str, int]) -> list[ParamGroup]:
    """Return the groups that one optimizer of the whole model would have.

    If all ranks have the same number of groups, with equal options, the i-th groups of all ranks form one group.
    Otherwise each group of a rank is a separate group (one per layer, for example), in the order of their first
    parameters; only groups with a common parameter are merged.
    """
    counts = {len(groups) for groups in by_rank}
    if len(counts) == 1 and all(
        _same(one.options, groups[0].options) for groups in zip(*by_rank, strict=True) for one in groups
    ):
        merged = [
            ParamGroup(groups[0].options, _sorted([name for group in groups for name in group.names], order))
            for groups in zip(*by_rank, strict=True)
        ]
    else:
        merged = []
        for group in (group for groups in by_rank for group in groups if any(group.names)):
            known = next((other for other in merged if set(other.names) & set(filter(None, group.names))), None)
            if known is None:
                merged.append(ParamGroup(group.options, _sorted(group.names, order)))
            else:
                known.names = _sorted([*known.names, *group.names], order)
        merged.sort(key=lambda group: order[group.names[0]])
    return merged


def _sorted(names: Sequence[str], order: Mapping[str, int]) -> list[str]:
    return sorted(dict.fromkeys(filter(None, names)), key=order.__getitem__)


def number_names(layout: Layout) -> dict[str, int]:
    """Return each parameter's number in the whole state, by name."""
    return {name: number for number, name in enumerate(name for names in layout for name in names)}


def describe_groups(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Return the groups in the form of a state's `param_groups`."""
    numbers = number_names([group.names for group in groups])
    return [
        {**group.options, "params": [numbers[name] for name in group.names], "param_names": list(group.names)}
        for group in groups
    ]


def whole_names(state: Mapping[str, Any], layout: Layout | None, known: Sequence[str]) -> Layout | str:
    """Return the names of a saved state's parameters, group by group, or the reason why they are unknown.

    They may be in the state ("param_names", or as keys, as in torch.distributed.checkpoint). Otherwise they come from
    `layout` if the state's groups have the same sizes, or from `known`, the names of all parameters, if the state has
    one group with as many.
    """
    groups = state["param_groups"]
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    if groups and all(isinstance(name, str) for group in groups for name in group["params"]):
        return [list(group["params"]) for group in groups]
    counts = [len(group["params"]) for group in groups]
    here = None if layout is None else [len(names) for names in layout]
    if layout is not None and counts == here:
        return layout
    if counts == [len(known)]:
        return [list(known)]
    if layout is None:
        return (
            "the state does not name its parameters (the optimizer that saved it did not know the names): load "
            "it on all ranks with Pipeline.load_optimizer_state_dict, which compares the groups of all stages"
        )
    return f"groups of {counts} parameters in the state, {here} in all stages here"


def fit(
    state: Mapping[str, Any],
    names: Layout,
    own: Sequence[ParamGroup],
    shapes: Mapping[str, torch.Size],
    known: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """Return the part of `state` for the groups `own`, as their optimizer loads it, and descriptions of mismatches."""
    problems = []
    home = {name: at for at, group in enumerate(names) for name in group}
    keys = {
        name: key
        for group, group_names in zip(state["param_groups"], names, strict=True)
        for key, name in zip(group["params"], group_names, strict=True)
    }
    wanted = [name for group in own for name in group.names if name]
    for what, found in (
        ("no state for", [name for name in wanted if name not in home]),
        ("state for parameters that the model does not have:", sorted(set(home) - set(known))),
    ):
        if found:
            problems.append(f"{what} {', '.join(found[:_SHOWN])}{', …' if len(found) > _SHOWN else ''}")
    groups, saved, number = [], {}, 0
    for at, group in enumerate(own):
        homes = [home[name] for name in group.names if name in home] or [min(at, len(names) - 1)]
        options = options_of(state["param_groups"][homes[0]])
        if any(not _same(options, options_of(state["param_groups"][other])) for other in homes):
            problems.append(
                f"parameters of one group here ({group.names[0]}, …) are in groups with other options in the state"
            )
        numbers = []
        for name in group.names:
            numbers.append(number)
            entry = state["state"].get(keys[name]) if name in keys else None
            if entry is not None:
                saved[number] = entry
                for key, shape in find_misshapen(entry, shapes[name]).items():
                    problems.append(f"{name}.{key}: {shape} in the state, {tuple(shapes[name])} here")
            number += 1
        groups.append({**options, "params": numbers})
    rest = {key: value for key, value in state["state"].items() if isinstance(key, str) and key not in home}
    return {**state, "state": {**saved, **rest}, "param_groups": groups}, problems


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)
