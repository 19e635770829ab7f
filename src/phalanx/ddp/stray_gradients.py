"""Detect gradients that were not averaged because the program did not call the wrapper's forward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class StrayGradients:
    """`StrayGradients` raises an error when an optimizer is about to step with gradients that were not averaged.

    Calling a method of the wrapped module instead of `forward` produces such gradients. If a round has averaged
    gradients since the last step, other gradients may be added, for example those of a penalty on the parameters.

    `names` are the names of `parameters`, in the same order.

    Cost: a dictionary lookup for each parameter of each optimizer step in this process.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], rank: int) -> None:
        self._names = names
        self._parameters = parameters
        self._rank = rank
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._strays: set[int] = set()
        self._averaged = False  # whether a round has ended since the last step
        _register_hook()
        _all.add(self)

    def on_gradient(self, index: int) -> None:
        """Record that a backward without a preceding forward of the wrapper has written a parameter's gradient."""
        if not (self._averaged or self._has_averaged_elsewhere(index)):
            self._strays.add(index)

    def _has_averaged_elsewhere(self, index: int) -> bool:
        """Return whether another wrapper has averaged the parameter's gradient since the last step."""
        key = id(self._parameters[index])
        return any(other._averaged and key in other._index_of for other in list(_all))

    def on_round(self) -> None:
        """Record that gradients were averaged, including in other wrappers of the same parameters."""
        self._averaged = True
        self._strays.clear()
        for other in list(_all):
            if other._strays:
                other._strays -= {other._index_of[id(p)] for p in self._parameters if id(p) in other._index_of}

    def before_step(self, optimizer: Optimizer) -> None:
        """Check the gradients with which an optimizer is about to step.

        Raises:
            RuntimeError: some gradients were not averaged.
        """
        if not (self._averaged or self._strays):
            return
        held = [
            index
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (index := self._index_of.get(id(parameter))) is not None
        ]
        if not held:
            return
        self._averaged = False
        self._strays = {index for index in self._strays if self._parameters[index].grad is not None}
        strays = sorted(self._strays.intersection(held))
        if strays:
            raise RuntimeError(_explain([self._names[index] for index in strays], self._rank))

    def close(self) -> None:
        """Stop checking steps."""
        _all.discard(self)


def _explain(names: Sequence[str], rank: int) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"DistributedDataParallel on rank {rank}: the gradient of {names[0]!r}{more} was not averaged, because no "
        "forward of the wrapper preceded its backward; ranks would drift apart. Call the wrapper, model(inputs), "
        "instead of a method of model.module, and let forward call that method. If each rank should step with its own "
        "gradients, run backward within model.no_sync()."
    )


_all: weakref.WeakSet[StrayGradients] = weakref.WeakSet()


@functools.cache
def _register_hook() -> None:
    """Register torch's hook once per process. It is never removed, for the reason given in `late_parameters`."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    for strays in list(_all):
        strays.before_step(optimizer)
