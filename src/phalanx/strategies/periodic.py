"""In these strategies replicas train apart and come together every so many steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.optim import DiLoCo, LocalSGD
from phalanx.optim.rounds import Rounds
from phalanx.strategies.each_rank import EachRank
from phalanx.strategies.mirrored import ReplicatedStrategy
from phalanx.strategies.recipe import require_parameters_of
from phalanx.strategies.strategy import MakeOptimizer
from phalanx.strategies.world import has_or_may_get_others


class _RoundsStrategy(ReplicatedStrategy):
    """It has a bare model on each rank, and a round of averaging after every so many steps of the optimizer."""

    def __init__(self, sync_every: int, devices: int | Sequence[str] | None, launch: bool, timeout: float) -> None:
        super().__init__(devices, launch=launch, timeout=timeout)
        self.sync_every = sync_every
        self.rounds: Rounds | None = None

    _skips_together = False
    is_in_step = False
    ranks_differ = True

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        model, made = super()._set_up(model, optimizer)
        if has_or_may_get_others():
            require_parameters_of(self._called, model, made)
            self.rounds = self._make_rounds(model, made)
        return model, made

    @abstractmethod
    def _make_rounds(self, model: nn.Module, optimizer: Optimizer) -> Rounds: ...

    def held(self) -> dict[str, Any]:
        """Return what this rank trains with, and what is kept between rounds."""
        return {**super().held(), **({} if self.rounds is None else {"rounds": self.rounds})}

    def parts(self) -> dict[str, Any]:
        """Return the parts, as every strategy does: model and optimizer are rank 0's; those of the others are in a part
        of their own.

        Cost: the models and optimizers of all ranks are sent to rank 0, which writes them.
        """
        held = self.held()
        return held if self.rounds is None else {**held, "rounds": EachRank(held, self.checkpoint_group)}

    def finish(self) -> None:
        """Hold the last round: then all ranks have the same model. All ranks call it."""
        if self.rounds is not None:
            self.rounds.finish()
            self.rounds = None

    def close(self) -> None:
        """Call `finish`, if nothing has called it. All ranks call it."""
        self.finish()
        super().close()


class LocalSGDStrategy(_RoundsStrategy):
    """Train by `phalanx.LocalSGD`: each rank steps by itself, and every `sync_every` steps parameters are averaged.

    Arguments:
        sync_every: steps of a round.
        devices, launch, timeout: as of MirroredStrategy; on one or several hosts.
    """

    name = "local_sgd"

    def __init__(
        self,
        sync_every: int = 32,
        *,
        devices: int | Sequence[str] | None = None,
        launch: bool = True,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(sync_every, devices, launch, timeout)

    def _make_rounds(self, model: nn.Module, optimizer: Optimizer) -> Rounds:
        return LocalSGD(model, optimizer, sync_every=self.sync_every)


class DiLoCoStrategy(_RoundsStrategy):
    """Train by `phalanx.DiLoCo`: as LocalSGDStrategy, but an outer optimizer steps by the ranks' mean movement.

    Arguments:
        sync_every: steps of a round.
        outer_optimizer: makes it of the model's parameters; default SGD with lr=0.7 and Nesterov momentum 0.9, as in
            the paper.
        devices, launch, timeout: as of MirroredStrategy; on one or several hosts.
    """

    name = "diloco"

    def __init__(
        self,
        sync_every: int = 100,
        *,
        outer_optimizer: Callable[[Any], Optimizer] | None = None,
        devices: int | Sequence[str] | None = None,
        launch: bool = True,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(sync_every, devices, launch, timeout)
        self._make_outer = outer_optimizer or _nesterov

    def _make_rounds(self, model: nn.Module, optimizer: Optimizer) -> Rounds:
        return DiLoCo(model, optimizer, self._make_outer(model.parameters()), sync_every=self.sync_every)


def _nesterov(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
