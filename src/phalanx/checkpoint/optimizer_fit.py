"""Check that a saved state fits an optimizer: its class, the order of its parameters, and a state for each of them.

An optimizer's state_dict names neither its class nor its parameters: it has options by group and tensors by number. A
CheckpointManager records the class, and the parameters' names if it also saves the model. Without these notes, the
options distinguish most classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx._base.param_groups import find_misshapen
from phalanx._base.partition.owners import owner_of, whole_name
from phalanx.checkpoint.wrappers import unwrap_key, wrapper_prefixes

_HOW = frozenset(("params", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"))
"""Entries that do not distinguish classes; the options among them change only how a state is used."""

Order = list[str]
"""The names of an optimizer's parameters by number; a name is "" if no model has the parameter."""


@dataclass(frozen=True)
class OptimizerNotes:
    """`OptimizerNotes` are a checkpoint's notes on its optimizers, by the names of the parts."""

    orders: Mapping[str, Order] = field(default_factory=dict)
    """The names of each optimizer's parameters, by number, if known."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """The class of each optimizer in torch.optim, or its nearest base class there."""


def note_optimizers(parts: Mapping[str, Any]) -> OptimizerNotes:
    """Return the notes to save on the optimizers among `parts`."""
    optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
    classes = {name: kind for name, part in optimizers.items() if (kind := _class_of(part))}
    orders = {name: [names[0] for names in order] for name, order in parameter_orders(parts).items()}
    return OptimizerNotes(orders, classes)


def find_other_class(name: str, optimizer: torch.optim.Optimizer, saved: str) -> list[str]:
    """Return how the class of `optimizer` differs from `saved`, if both are known.

    The options alone would not reveal it: those of RAdam and Adamax, for example, are the same.
    """
    here = _class_of(optimizer)
    if not saved or not here or saved == here:
        return []
    return [f"{name}: the checkpoint has the state of another optimizer class: {saved} (here {here})"]


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class in torch.optim, or of its nearest base class there; "" if none."""
    inner = getattr(optimizer, "optim", None)  # the optimizer inside a ZeroRedundancyOptimizer
    kind = type(inner if isinstance(inner, torch.optim.Optimizer) else optimizer)
    known = [one for one in kind.__mro__ if one is not torch.optim.Optimizer and one in vars(torch.optim).values()]
    return known[0].__name__ if known else ""


def parameter_orders(parts: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return, for each optimizer in `parts`, all names that its parameters have in the models in `parts`.

    A parameter may have several names; its name is "" if no model has it. Optimizers of a split model are left out,
    because their states are saved by name.
    """
    known: dict[int, list[str]] = {}
    for part_name, part in parts.items():
        if isinstance(part, nn.Module):
            prefixes = wrapper_prefixes(part)
            for name, parameter in part.named_parameters(remove_duplicate=False):
                known.setdefault(id(parameter), []).append(f"{part_name}.{unwrap_key(name, prefixes)}")
    found = {}
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer) and owner_of(part) is None:
            order = [known.get(id(parameter), [""]) for group in part.param_groups for parameter in group["params"]]
            if any(any(names) for names in order):
                found[name] = order
    return found


def find_misfits(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> list[str]:
    """Return why `optimizer` cannot load the state `saved`, as sentences; an empty list if it can."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list):
        return [f"{name}: the checkpoint's state is not an optimizer's"]
    there, here = [len(g["params"]) for g in groups], [len(g["params"]) for g in optimizer.param_groups]
    if there != here:
        return [f"{name}: parameter groups of {there} parameters in the checkpoint, {here} here"]
    if problem := _compare_options(groups, optimizer.param_groups):
        return [f"{name}: {problem} (here a {type(optimizer).__name__})"]
    # Another library's step may keep states of other shapes, such as the smaller moments of a low-rank optimizer.
    if not type(optimizer).step.__module__.startswith(("torch.", "phalanx.")):
        return []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    found = []
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, shape in find_misshapen(saved.get("state", {}).get(number, {}), parameter.shape).items():
            found.append(f"{name}.state.{number}.{key}: {shape} in the checkpoint, {tuple(parameter.shape)} here")
    return found


def find_other_order(name: str, saved: Sequence[str], here: Sequence[Sequence[str]]) -> list[str]:
    """Describe the first parameter whose number differs from its number in the checkpoint."""
    for number, (theirs, mine) in enumerate(zip(saved, here, strict=False)):
        if theirs and any(mine) and theirs not in mine:
            return [f"{name}: parameter {number} is {theirs!r} in the checkpoint, {mine[0]!r} here"]
    return []


def _compare_options(saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> str:
    for theirs, mine in zip(saved, here, strict=True):
        unknown = [key for key in theirs if key not in mine and key in _options_of_torch()]
        missing = [key for key in mine if key not in theirs and key in _options_of_torch()]
        if unknown or missing:
            words = [f"it has {', '.join(unknown)}"] * bool(unknown) + [f"it lacks {', '.join(missing)}"] * bool(
                missing
            )
            return f"the checkpoint has the state of another optimizer class: {' and '.join(words)}"
    return ""


@functools.cache
def _options_of_torch() -> frozenset[str]:
    """Return the names of options that distinguish the classes of torch.optim."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    optimizers = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    return frozenset(key for kind in optimizers for key in inspect.signature(kind).parameters) - _HOW


_SHOWN = 4


def describe_missing_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
    """Return a sentence on the trained parameters that have no state in `saved`; "" if all have one.

    `load_state_dict` silently accepts an incomplete state; the other parameters would start from scratch.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    known = [name for group in saved.get("param_groups", ()) for name in group.get("param_names", group["params"])]
    names = [whole_name(parameter) or name for parameter, name in zip(parameters, known, strict=False)]
    keeps_state = _keep_state(optimizer)
    trained = [
        (number, name)
        for number, name, parameter, keeps in zip(numbers, names, parameters, keeps_state, strict=False)
        if parameter.requires_grad and keeps
    ]
    missing = [name for number, name in trained if number not in saved.get("state", {})]
    if not missing or (len(missing) == len(trained) and not _is_of_torch(optimizer)):
        return ""  # an optimizer of another library may keep no state
    if len(missing) == len(trained):
        return (
            "has no state in the checkpoint, which was saved before its first step or without its state. It starts "
            "from scratch."
        )
    shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
    return (
        f"has no state for {len(missing)} of {len(trained)} parameters ({shown}), which start from scratch: "
        "they had no gradient before the save, or their state was left out."
    )


def _keep_state(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return for each parameter whether its optimizer may keep a state for it."""
    inner = getattr(optimizer, "optim", optimizer)  # the optimizer inside a ZeroRedundancyOptimizer
    groups = [(group, len(group["params"])) for group in optimizer.param_groups]
    if isinstance(inner, torch.optim.SGD):
        return [bool(group["momentum"]) for group, num in groups for _ in range(num)]
    num_parameters = sum(num for _, num in groups)
    if isinstance(inner, torch.optim.LBFGS):  # one state, at its first parameter
        return [number == 0 for number in range(num_parameters)]
    return [True] * num_parameters


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    inner = getattr(optimizer, "optim", optimizer)  # the optimizer inside a ZeroRedundancyOptimizer
    return type(inner).__module__.startswith("torch.optim")
