"""Read the parameter groups that trainers pass; `ShardGroups` are a server's part of them, with their optimizer.

A group in a message or a state is `{"params": [name, ...], "lr": ..., ...}`. Groups are "dense" or "tables"; each of
the two kinds has its own optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.param_groups import MakeOptimizer, options_of

Group = dict[str, Any]
Options = dict[str, Any]
KINDS = ("dense", "tables")


def read_groups(what: str, given: object) -> list[tuple[dict[str, Tensor], Options]]:
    """Return the named tensors and the options of each group, from a mapping by name or a list of groups as in torch.

    Raises:
        TypeError: `given` is neither a mapping nor a list of groups.
    """
    if given is None or isinstance(given, Mapping):
        return [(dict(given), {})] if given else []
    if isinstance(given, Sequence) and all(isinstance(one, Mapping) and "params" in one for one in given):
        return [read_group(what, one) for one in given]
    raise TypeError(
        f"ParameterServer: {what} must be tensors by name, as dict(module.named_parameters()), or a list of groups "
        f"{{'params': tensors by name, 'lr': ...}}, got {type(given).__name__}"
    )


def read_group(what: str, group: Mapping[str, Any]) -> tuple[dict[str, Tensor], Options]:
    """Return the named tensors and the options of one group.

    Raises:
        TypeError: the group's tensors have no names.
    """
    params = group["params"]
    if not isinstance(params, Mapping):
        pairs = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
        if not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in pairs):
            raise TypeError(
                f"ParameterServer: 'params' of a group of {what} must be tensors with their names, because "
                "servers look them up by name: {'params': module.named_parameters(), ...}"
            )
        params = dict(pairs)
    return dict(params), options_of(group)


def copy_options(group: Mapping[str, Any]) -> Options:
    """Return copies of the entries of a group that are not parameters."""
    return {key: copy_value(one) for key, one in options_of(group).items()}


def copy_value(value: Any) -> Any:
    """Return a copy of a tensor, which in-place changes do not affect; return any other value itself."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def find_differing(one: Options, other: Options) -> list[str]:
    """Return the names of the options that differ."""
    return sorted(
        key for key in one.keys() | other.keys() if not (key in one and key in other and _same(one[key], other[key]))
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one is other or one == other)


class ShardGroups:
    """`ShardGroups` are the dense parameters, or the parts of tables, on this server, and their optimizer.

    `options` has every group's options as a trainer last sent them. Only options that a trainer has changed since then
    are set in the optimizer, which may store further options of its own in a group.
    """

    def __init__(self, make: MakeOptimizer, groups: Sequence[Group], values: Mapping[str, Tensor]) -> None:
        self._make = make
        self._names = [list(group["params"]) for group in groups]
        self.options = [copy_options(group) for group in groups]
        self.parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer: torch.optim.Optimizer | None = None
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        """Create the optimizer once there is a parameter for it."""
        if self.optimizer is not None or not self.parameters:
            return
        members = [self._members(number) for number in range(len(self._names))]
        if len(members) == 1:  # pass one group as a list, which any function that makes an optimizer accepts
            self.optimizer = self._make(members[0])
            self.optimizer.param_groups[0].update(copy_options(self.options[0]))
        else:
            groups = zip(self.options, members, strict=True)
            self.optimizer = self._make([{**copy_options(options), "params": mine} for options, mine in groups])

    def _members(self, number: int) -> list[torch.nn.Parameter]:
        return [self.parameters[name] for name in self._names[number] if name in self.parameters]

    def add(self, group: Group, values: Mapping[str, Tensor]) -> None:
        """Add a group, with this server's part of its values."""
        self._names.append(list(group["params"]))
        self.options.append(copy_options(group))
        self.parameters |= {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        if self.optimizer is None:
            self._make_optimizer()
        else:
            mine = self._members(len(self._names) - 1)
            self.optimizer.add_param_group({**copy_options(group), "params": mine})

    def set_options(self, new: Sequence[Options]) -> None:
        """Set the options that a trainer has changed.

        A trainer in asynchronous training may not have all groups yet.
        """
        for number, (before, options) in enumerate(zip(self.options, new, strict=False)):
            changed = {key: copy_value(options[key]) for key in find_differing(before, options) if key in options}
            before.update(changed)
            if self.optimizer is not None:
                self.optimizer.param_groups[number].update(copy_options(changed))

    def groups(self, new: Sequence[Options] | None = None) -> list[Group]:
        """Return all groups with this server's options; options that a trainer has changed in `new` replace them."""
        found = []
        for number, (names, before) in enumerate(zip(self._names, self.options, strict=True)):
            options = before if self.optimizer is None else self.optimizer.param_groups[number]
            theirs = new[number] if new is not None and number < len(new) else before
            changed = {key: theirs[key] for key in find_differing(before, theirs) if key in theirs}
            found.append({"params": list(names), **copy_options({**options, **changed})})
        return found

    def load(self, values: Mapping[str, Tensor], state: Mapping[str, Any], groups: Sequence[Group] | None) -> None:
        """Load values, their optimizer state, and the groups' options if given."""
        for number, group in enumerate(groups or ()):
            self.options[number] = copy_options(group)
            if self.optimizer is not None:
                self.optimizer.param_groups[number].update(copy_options(group))
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.copy_(values[name])
            if self.optimizer is not None:
                self.optimizer.state.pop(parameter, None)
                if name in state:
                    self.optimizer.state[parameter] = copy_values(state[name])

    def optimizer_state(self) -> dict[str, Any]:
        """Return a copy of the optimizer state by parameter name."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state
        return {name: copy_values(state[one]) for name, one in self.parameters.items() if state.get(one)}


def copy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's optimizer state."""
    return {key: one.clone() if isinstance(one, Tensor) else one for key, one in values.items()}
