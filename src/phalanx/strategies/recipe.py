"""A `Recipe` describes an optimizer, so that an equivalent optimizer can be created over a rank's parameters."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx._base.param_groups import MakeOptimizer, options_of
from phalanx.errors import summary_of


@dataclass(frozen=True)
class Recipe:
    """A `Recipe` has a function that makes an optimizer, and the groups and hooks of the original.

    `groups` have the names of their parameters, and their options.

    `call` is the optimizer's class with its defaults. If that would not reproduce the original's settings, `call` is
    the function that made the original.
    """

    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: tuple[tuple[tuple[str, ...], dict[str, Any]], ...]
    call: MakeOptimizer
    hooks: dict[str, Any]

    @staticmethod
    def of(called: str, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> Recipe:
        """Return the recipe of `optimizer` over parameters of `model`.

        Cost: one or two more optimizers are created over the model's parameters, and dropped.

        Raises:
            ValueError: the optimizer has stepped, has a scheduler, holds a tensor that is not a parameter of the model,
                or could not be recreated with the same settings.
        """
        one = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
        kind = type(one).__name__
        if any(float(state.get("step", 1)) for state in one.state.values()):  # Adagrad has state before its first step
            raise ValueError(
                f"{called}.setup: the {kind} has made steps already: pass it before its first step, and load a "
                "checkpoint after setup"
            )
        if hasattr(one.step, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"{called}.setup: a scheduler uses the {kind}, but setup creates a new {kind} over each rank's "
                "parameters: create the scheduler after setup, with the optimizer that setup returns"
            )
        require_parameters_of(called, model, one)
        named = dict(model.named_parameters())
        name_of = {id(parameter): name for name, parameter in named.items()}
        groups = tuple(
            (tuple(name_of[id(p)] for p in group["params"]), options_of(group)) for group in one.param_groups
        )
        accepted = _list_accepted(type(one))
        defaults = {key: value for key, value in one.defaults.items() if key in accepted}
        hooks = {name: vars(one)[name] for name in _HOOKS}
        recipe = Recipe(type(one), defaults, groups, functools.partial(type(one), **defaults), hooks)
        problem = _find_loss(one, recipe, named)
        if problem is None:
            return recipe
        if isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{called}.setup: the {kind} would lose {problem}: setup creates it again over each rank's parameters, "
                f"from its class and the options of its groups. Pass setup a function that creates it instead: "
                f"functools.partial({kind}, ...)"
            )
        again = functools.partial(_call_again, called, optimizer)
        others = {name: nn.Parameter(one.detach(), one.requires_grad) for name, one in named.items()}
        again(recipe.make_groups(others))  # so that every rank sees a failure here, before any rank waits for another
        return Recipe(_class_of(type(one), again), {}, groups, optimizer, hooks)

    def make_groups(self, parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the groups with only those parameters that are in `parameters`; a group may be empty."""
        return [
            {**options, "params": [parameters[name] for name in names if name in parameters]}
            for names, options in self.groups
        ]

    def make(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """Return the optimizer over `parameters`, by name, with the hooks of the original."""
        return self.attach_hooks(self.kind(self.make_groups(parameters), **self.defaults))

    def attach_hooks(self, made: Optimizer) -> Optimizer:
        """Return `made` with the hooks of the original optimizer; the hooks' handles still remove them."""
        vars(made).update(self.hooks)
        return made


def require_parameters_of(called: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of a tensor that is not a parameter of `model`, and so would be neither averaged nor saved.

    Raises:
        ValueError: the optimizer holds such a tensor; the message has its shape.
    """
    known = {id(parameter) for parameter in model.parameters()}
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if unknown:
        raise ValueError(
            f"{called}.setup: the {type(optimizer).__name__} holds a tensor of shape {tuple(unknown[0].shape)} that is "
            f"not a parameter of {type(model).__name__}. Pass the model whose parameters the optimizer holds. If the "
            "tensor belongs to a loss function, make the function a module of the model, and let the model compute the "
            "loss (loss_of; in the Trainer, training_step)"
        )


def _list_accepted(kind: type[Optimizer]) -> set[str]:
    """Return the names of a constructor's arguments, including those that it passes to its base class as **options."""
    accepted: set[str] = set()
    for one in kind.__mro__:
        if "__init__" in vars(one):
            parameters = inspect.signature(one.__init__).parameters  # type: ignore[misc]
            accepted |= set(parameters)
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return accepted


def _find_loss(one: Optimizer, recipe: Recipe, named: Mapping[str, Tensor]) -> str | None:
    """Describe a setting of `one` that an optimizer made from the recipe would lack; None if it has all settings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the original caused the same warnings
            other = recipe.call(recipe.make_groups(named))
    except Exception as error:  # any error of a user's constructor
        return f"an argument that its class requires ({summary_of(error)})"
    name = _find_difference(one, other)
    return None if name is None else f"its {name!r}, which is not an option of its groups"


def _call_again(called: str, function: MakeOptimizer, groups: Any) -> Optimizer:
    """Return the optimizer that `function` makes from `groups`.

    Raises:
        ValueError: the function fails, or returns an optimizer over other parameters.
    """
    groups = list(groups)
    advice = (
        "it is called with groups of each rank's parameters ({'params': [...], 'lr': ...}), because its optimizer has "
        "settings that are not options of groups: let it pass its argument to the optimizer unchanged"
    )
    try:
        made = function(groups)
    except Exception as error:
        raise ValueError(
            f"{called}.setup: the function for the optimizer failed ({summary_of(error)}); {advice}"
        ) from error
    theirs = [[id(one) for one in group["params"]] for group in made.param_groups]
    if theirs != [[id(one) for one in group["params"]] for group in groups]:
        raise ValueError(f"{called}.setup: the function for the optimizer made one over other parameters; {advice}")
    return made


def _class_of(kind: type[Optimizer], make: MakeOptimizer) -> type[Optimizer]:
    """Return a subclass of `kind` whose constructor calls `make`, for callers that need a class; without hooks."""

    def new(_: type[Optimizer], params: Any) -> Optimizer:
        made = make(params)
        for name in _HOOKS:
            vars(made)[name] = type(vars(made)[name])()
        return made

    return type(kind.__name__, (kind,), {"__new__": new, "__module__": kind.__module__})


# Find a setting in which two optimizers differ: in a group, an attribute, or an object inside one.

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""The attributes in which an optimizer keeps its hooks."""

_ComparedPairs = dict[tuple[int, int], tuple[Any, Any]]


def _find_difference(one: Optimizer, other: Optimizer) -> str | None:
    """Return the name of a setting in which two optimizers over the same parameters differ, or None.

    Hooks do not count. An object that cannot be compared counts as different.
    """
    compared: _ComparedPairs = {(id(one), id(other)): (one, other)}
    first, second = ([options_of(group) for group in of.param_groups] for of in (one, other))
    return _differ(_settings(one), _settings(other), "", compared) or _differ(first, second, "param_groups", compared)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if key not in (*_HOOKS, "param_groups")}


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
    """Return the parts of a callable to compare, since each call of a constructor may create a new but equal object."""
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
        return bool(one == other) or bool(one != one and other != other)  # two NaNs are equal
    except Exception:  # any error of a user's class, or the ambiguous truth value of an array
        return False
