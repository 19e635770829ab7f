"""`PeriodicModelAverager` has PyTorch's name and arguments, and averages in memory that the ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from phalanx.optim.arguments import decide_group
from phalanx.optim.flat import Flat


class PeriodicModelAverager:
    """Average parameters over the ranks at every `period`-th call, after `warmup_steps` calls that do nothing.

    It takes the place of `torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager`, also within
    PyTorch's `PostLocalSGDOptimizer`, which saves `step`. As there, only parameters that have a gradient are averaged,
    which must be the same on every rank. Other than there, parameters keep their memory.

    Cost: one all_reduce per dtype, without a copy beside `Flat`'s where ranks share memory.
    Memory: the parameters once more, on every rank, from the first averaging on.
    Numerics: bitwise equal on all ranks: the sum divided by the number of ranks, where PyTorch's divides first.

    Arguments:
        process_group: the default group if None.

    Raises:
        ValueError: `period` or `warmup_steps` makes no sense.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        if period < 1:
            raise ValueError(f"PeriodicModelAverager: period must be 1 or more, got {period}")
        if warmup_steps < 0:
            raise ValueError(f"PeriodicModelAverager: warmup_steps must be 0 or more, got {warmup_steps}")
        self.period = period
        self.warmup_steps = warmup_steps
        self.process_group = decide_group(process_group, "PeriodicModelAverager")
        self.step = 0
        self._averaged: list[Tensor] = []
        self._flat: Flat | None = None

    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count one step; average if it is one of those, when all ranks call it. It takes parameters or an optimizer's
        groups.

        Shape: any; parameters and which of them have gradients are the same on every rank.

        Raises:
            PhalanxError: a rank died or is late: every parameter holds what it held before.
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            flat = self._room_for([parameter for parameter in _parameters(params) if parameter.grad is not None])
            flat.take()
            flat.average(self.process_group, range(self.process_group.size()))
            flat.give()
        self.step += 1

    def _room_for(self, parameters: list[Tensor]) -> Flat:
        """Return the room of the last time if the parameters are the same, else a new one. All ranks call it."""
        if self._flat is None or [id(one) for one in self._averaged] != [id(one) for one in parameters]:
            self._flat = Flat(parameters, group=self.process_group)
            self._averaged = parameters
        return self._flat


def _parameters(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for one in params:
        if isinstance(one, Tensor):
            yield one
        else:
            yield from one["params"]
