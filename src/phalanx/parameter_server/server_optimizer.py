"""`ServerOptimizer` stands in for the servers' optimizer on a trainer: schedulers and users set its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from phalanx._base.param_groups import MakeOptimizer
from phalanx.errors import summary_of
from phalanx.parameter_server.groups import Group, Options, copy_options, read_group

AddGroup = Callable[[str, Group, dict[str, Tensor]], None]


class ServerOptimizer(torch.optim.Optimizer):
    """`ServerOptimizer` has the `param_groups` of the servers' optimizer for dense parameters or tables.

    Each push sends the options of the groups, which a scheduler or the user sets here, to the servers. The tensors in
    the groups are the arguments of the `ParameterServer`, and do not change.
    """

    def __init__(self, kind: str, made: torch.optim.Optimizer, names: Sequence[Sequence[str]], add: AddGroup) -> None:
        self._kind = kind
        self._add: AddGroup | None = None
        self._is_pushing = False
        self.names = [list(each) for each in names]
        groups = [{**copy_options(group), "params": [p.data for p in group["params"]]} for group in made.param_groups]
        super().__init__(groups, made.defaults)
        self._add = add

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group on the servers, with the first trainer's values. All trainers call it.

        `param_group` has the form that the constructor of `ParameterServer` accepts: "params" by name, and options.

        Raises:
            ValueError, TypeError: the group is invalid.
            MismatchError: another trainer has added a different group.
            PeerLostError: the first trainer is lost, or all servers of a shard are lost.
        """
        if self._add is None:
            super().add_param_group(param_group)
            return
        values, options = read_group(self._kind, param_group)
        values = {name: value.detach() for name, value in values.items()}
        super().add_param_group({**options, "params": list(values.values())})
        try:
            self._add(self._kind, {"params": list(values), **copy_options(self.param_groups[-1])}, values)
        except BaseException:
            self.param_groups.pop()
            raise
        self.names.append(list(values))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refuse to step, because a push is the step. A push itself calls this, to run hooks and notify schedulers."""
        if not self._is_pushing:
            raise RuntimeError(
                "ParameterServer: the servers make the optimizer's step when they receive gradients: call "
                "ParameterServer.push or push_gradients instead"
            )

    def notify_push(self) -> None:
        """Notify hooks and schedulers that a push has made a step."""
        self._is_pushing = True
        try:
            self.step()
        finally:
            self._is_pushing = False

    def options(self) -> list[Options]:
        """Return the current options of all groups."""
        return [copy_options(group) for group in self.param_groups]

    def set_options(self, new: Sequence[Options]) -> None:
        """Set the options of all groups to `new`."""
        for group, options in zip(self.param_groups, new, strict=True):
            group.update(copy_options(options))

    def state_dict(self) -> NoReturn:
        """Refuse: the state is on the servers."""
        raise RuntimeError(
            "ParameterServer: the servers keep the optimizer's state: save ParameterServer.state_dict(), which has the "
            "parameters, the groups' options and the state of both optimizers"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refuse: the state is on the servers."""
        raise RuntimeError(
            "ParameterServer: the servers keep the optimizer's state: call ParameterServer.load_state_dict"
        )


def make_server_optimizer(
    kind: str,
    argument: str,
    make: MakeOptimizer,
    groups: Sequence[tuple[Mapping[str, Tensor], Options]],
    add: AddGroup,
) -> ServerOptimizer:
    """Return an optimizer with the options that `make` gives these groups.

    Raises:
        ValueError: the optimizer cannot be constructed with these groups, or regroups the parameters: each server would
            regroup only its part.
    """
    members = [[torch.nn.Parameter(value) for value in values.values()] for values, _ in groups]
    given = [{**copy_options(options), "params": mine} for mine, (_, options) in zip(members, groups, strict=True)]
    try:
        made = make(members[0]) if len(given) == 1 and len(given[0]) == 1 else make(given)
    except Exception as error:  # any error of a user's optimizer
        raise ValueError(
            f"ParameterServer: {argument} {make!r} cannot be constructed with the {kind}: {summary_of(error)}"
        ) from error
    found = [[id(one) for one in group["params"]] for group in made.param_groups]
    if found != [[id(one) for one in mine] for mine in members]:
        raise ValueError(
            f"ParameterServer: {argument} {make!r} changes the groups that it receives. Each server calls it with "
            f"that server's parameters. Pass the groups: {kind}=[{{'params': tensors by name, 'lr': ...}}, ...]"
        )
    return ServerOptimizer(kind, made, [list(values) for values, _ in groups], add)
