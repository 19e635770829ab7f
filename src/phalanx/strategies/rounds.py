"""Replicas that train apart and come together every so many steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.optim import DiLoCo, LocalSGD
from phalanx.optim.rounds import Rounds
from phalanx.strategies.mirrored import ReplicatedStrategy
from phalanx.strategies.strategy import MakeOptimizer


class _RoundsStrategy(ReplicatedStrategy):
    """A bare model on each rank, and a round of averaging behind every so many steps of the optimizer."""

    def __init__(self, sync_every: int, devices: int | Sequence[str] | None, launch: bool, timeout: float) -> None:
        super().__init__(devices, launch=launch, timeout=timeout)
        self.sync_every = sync_every
        self.rounds: Rounds | None = None

    _skips_together = False

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        model, made = super()._set_up(model, optimizer)
        if self.process_group is not None:
            self.rounds = self._make_rounds(model, made)
        return model, made

    @abstractmethod
    def _make_rounds(self, model: nn.Module, optimizer: Optimizer) -> Rounds: ...

    def parts(self) -> dict[str, Any]:
        """Also what is kept between rounds. A checkpoint is of rank 0's model: take it at the end of a round."""
        return {**super().parts(), **({} if self.rounds is None else {"rounds": self.rounds})}

    def close(self) -> None:
        """Hold the last round: then all ranks have the same model. Collective."""
        if self.rounds is not None:
            self.rounds.finish()
            self.rounds = None


class LocalSGDStrategy(_RoundsStrategy):
    """`phalanx.LocalSGD`: each rank steps by itself, and every `sync_every` steps parameters are averaged.

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
    """`phalanx.DiLoCo`: as LocalSGDStrategy, with an outer optimizer that takes a step with the ranks' mean movement.

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
