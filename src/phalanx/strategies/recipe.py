"""A `Recipe` is an optimizer taken apart, so that one of its kind can be made over what a rank holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Any], Optimizer]


@dataclass(frozen=True)
class Recipe:
    """It makes an optimizer: it has the class, the defaults, and the groups' parameters by name with their options."""

    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: tuple[tuple[tuple[str, ...], dict[str, Any]], ...]

    @staticmethod
    def of(called: str, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> Recipe:
        """Return the recipe of `optimizer` over parameters of `model`.

        Raises:
            ValueError: it has stepped, or holds what is no parameter of the model.
        """
        one = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
        kind = type(one).__name__
        if any(float(state.get("step", 1)) for state in one.state.values()):  # Adagrad has some before its first step
            raise ValueError(
                f"{called}.setup: the {kind} has state of steps already: give it before its first step, and load a "
                "checkpoint behind setup"
            )
        if hasattr(one.step, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"{called}.setup: a scheduler holds the {kind}, which is made again over what each rank holds: make "
                "the scheduler behind setup, of the optimizer that it returns"
            )
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = []
        for group in one.param_groups:
            unknown = [p for p in group["params"] if id(p) not in name_of]
            if unknown:
                raise ValueError(
                    f"{called}.setup: the {kind} holds a tensor of shape {tuple(unknown[0].shape)} that is no "
                    f"parameter of {type(model).__name__}: give setup the model whose parameters it holds"
                )
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append((tuple(name_of[id(p)] for p in group["params"]), options))
        accepted = inspect.signature(type(one).__init__).parameters
        defaults = {key: value for key, value in one.defaults.items() if key in accepted}
        return Recipe(type(one), defaults, tuple(groups))

    def make_groups(self, held: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the groups over those parameters that are in `held`; a group that has none of them stays, empty."""
        return [{**options, "params": [held[name] for name in names if name in held]} for names, options in self.groups]

    def make(self, held: Mapping[str, Tensor]) -> Optimizer:
        """Return the optimizer over the parameters in `held`."""
        return self.kind(self.make_groups(held), **self.defaults)
