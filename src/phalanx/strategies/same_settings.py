"""Find a setting in which two optimizers differ, in a group, an attribute, or an object inside one."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""The attributes in which an optimizer keeps its hooks."""

_ComparedPairs = dict[tuple[int, int], tuple[Any, Any]]
_OF_THE_WHOLE = ("params", "param_names")  # keys of a group that are not options


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_THE_WHOLE}


def find_difference(one: Optimizer, other: Optimizer) -> str | None:
    """Return the name of a setting in which two optimizers over the same parameters differ, or None.

    Hooks do not count. An object that cannot be compared counts as different.
    """
    compared: _ComparedPairs = {(id(one), id(other)): (one, other)}
    first, second = ([options_of(group) for group in of.param_groups] for of in (one, other))
    return _differ(_settings(one), _settings(other), "", compared) or _differ(first, second, "param_groups", compared)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if key not in (*HOOKS, "param_groups")}


def _differ(one: Any, other: Any, place: str, compared: _ComparedPairs) -> str | None:
    """Return the place of the first difference, or None.

    `compared` has the pairs that are compared or being compared; it keeps them alive, so that their ids stay unique.
    """
    if one is other or (id(one), id(other)) in compared:
        return None
    compared[id(one), id(other)] = one, other
    equals: Any = type(one).__eq__
    pairs: Iterable[tuple[str, Any, Any]]
    if type(one) is not type(other):
        return place
    if isinstance(one, Tensor):
        return None if _equal_tensors(one, other) else place
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return _below(place, next(iter(one.keys() ^ other.keys())))
        pairs = ((_below(place, key), value, other[key]) for key, value in one.items())
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return place
        pairs = ((f"{place}[{i}]", value, other[i]) for i, value in enumerate(one))
    elif (parts := _parts(one)) is not None:
        pairs = ((place, *both) for both in zip(parts, _parts(other) or (), strict=True))
    elif equals is not object.__eq__:
        return None if _equal(one, other) else place
    elif hasattr(one, "__dict__"):
        pairs = [(place, vars(one), vars(other))]
    else:
        return place
    found = (_differ(its, others, where, compared) for where, its, others in pairs)
    return next((where for where in found if where is not None), None)


def _below(place: str, key: Any) -> str:
    if place in ("", "defaults", "state"):
        return key if isinstance(key, str) else place
    return f"{place}.{key}" if isinstance(key, str) and key.isidentifier() else f"{place}[{key!r}]"


def _parts(one: Any) -> tuple[Any, ...] | None:
    """Return the parts of a callable, since each call of a constructor may make a new object of it."""
    if isinstance(one, types.FunctionType):
        cells = [_contents_of(cell) for cell in one.__closure__ or ()]
        return one.__code__, cells, one.__defaults__, one.__kwdefaults__
    if isinstance(one, types.MethodType):
        return one.__func__, one.__self__
    if isinstance(one, functools.partial):
        return one.func, one.args, one.keywords
    return None


def _contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return one.is_meta or _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, Tensor):
            return torch.equal(one, other)
        return bool(one == other) or bool(one != one and other != other)  # the latter is NaN
    except Exception:  # any error of a user's class, or of an array of several values
        return False
