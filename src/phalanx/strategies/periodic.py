"""Train replicas independently, and synchronize them every few steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx._base.param_groups import MakeOptimizer
from phalanx.optim import DiLoCo, LocalSGD
from phalanx.optim.rounds import Rounds
from phalanx.strategies.mirrored import ReplicatedStrategy
from phalanx.strategies.per_rank_state import PerRankState
from phalanx.strategies.recipe import require_parameters_of
from phalanx.strategies.strategy import may_have_others


class _RoundsStrategy(ReplicatedStrategy):
    """A `_RoundsStrategy` trains a model without a wrapper on each rank, and combines the models every few steps."""

    def __init__(self, sync_every: int, devices: int | Sequence[str] | None, launch: bool, timeout: float) -> None:
        super().__init__(devices, launch=launch, timeout=timeout)
        self.sync_every = sync_every
        self.rounds: Rounds | None = None

    _skips_together = False
    is_in_step = False
    ranks_differ = True

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        model, made = super()._set_up(model, optimizer)
        if may_have_others():
            require_parameters_of(self._called, model, made)
            self.rounds = self._make_rounds(model, made)
        return model, made

    @abstractmethod
    def _make_rounds(self, model: nn.Module, optimizer: Optimizer) -> Rounds: ...

    def training_objects(self) -> dict[str, Any]:
        """Return this rank's training objects, and its state between rounds."""
        return {**super().training_objects(), **({} if self.rounds is None else {"rounds": self.rounds})}

    def parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint: rank 0's objects, and a part with the states of all ranks.

        Cost: the models and optimizers of all ranks are sent to rank 0, which writes them.
        """
        objects = self.training_objects()
        return objects if self.rounds is None else {**objects, "rounds": PerRankState(objects, self.checkpoint_group)}

    def finish(self) -> None:
        """Run the last round, after which all ranks have the same model. All ranks call this."""
        if self.rounds is not None:
            self.rounds.finish()
            self.rounds = None

    def _abandon(self) -> None:
        if self.rounds is not None:
            self.rounds.abandon()
            self.rounds = None
        super()._abandon()

    def close(self) -> None:
        """Call `finish`, unless it was called before. All ranks call this."""
        self.finish()
        super().close()


class LocalSGDStrategy(_RoundsStrategy):
    """Train with `phalanx.LocalSGD`: each rank steps by itself, and parameters are averaged every `sync_every` steps.

    Arguments:
        sync_every: the number of steps in a round.
        devices, launch, timeout: as in MirroredStrategy; on one or several hosts.
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
    """Train with `phalanx.DiLoCo`: like LocalSGD, but an outer optimizer steps by the ranks' mean parameter change.

    Arguments:
        sync_every: the number of steps in a round.
        outer_optimizer: a function that makes the outer optimizer from the model's parameters; by default SGD with
            lr=0.7 and Nesterov momentum 0.9, as in the paper.
        devices, launch, timeout: as in MirroredStrategy; on one or several hosts.
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
