"""`EASGD` lets replicas train apart, each tied to a center that follows them.

c      center variable, the same on all ranks
x_i    rank i's parameters                            P ranks, alpha = beta / P

a round     x_i <- x_i - alpha (x_i - c)
            c   <- c + alpha * sum over i of (x_i - c)         both with the values from before it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.optim.outer import CommonParameters
from phalanx.optim.rounds import Rounds


class EASGD(Rounds):
    """Move replicas and a center towards each other (elastic averaging) every `sync_every` steps of `optimizer`.

        with phalanx.EASGD(model, optimizer, sync_every=10):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                optimizer.step()                        # every 10th also takes the elastic step

    Replicas stay different on purpose: they explore, and the center is the model. At the end of the block all ranks
    have the center. With SGD and Nesterov momentum as `optimizer` it is the paper's EAMSGD.

    Collective calls, uneven ends and buffers are those of `LocalSGD`. A rank that has not stepped since the last round
    does not move the center, and is not moved towards it.

    Cost: per round, two all_reduces, of 8 bytes a rank and of the parameters' size.
    Memory: the parameters twice more, on every rank.
    Numerics: the center is bitwise equal on all ranks after each round.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (those of the host, say) may be around it.
        beta: how far the center goes towards the mean of the replicas in a round, in 0..1; each replica goes
            alpha = beta / (number of ranks) of the way to the center.
        backup_device: where the center is kept between rounds; None is where the parameters are.
        process_group: the ranks that train together; the default group if None.

    Raises:
        ValueError: an argument makes no sense, or gradients of the same ranks are averaged at every step already.
        MismatchError: ranks construct it with different arguments or models.
        PhalanxError: in a round, a rank died or is late: every parameter holds what it held before the round.

    Source: Zhang, Choromanska and LeCun (2015), Deep learning with Elastic Averaging SGD; the synchronous form (their
    equations 2.3 and 2.4), with a communication period of `sync_every`.
    """

    _name = "EASGD"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        beta: float = 0.9,
        backup_device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (isinstance(beta, float | int) and 0 < beta <= 1):
            raise ValueError(f"EASGD: beta must be above 0 and at most 1, got {beta!r}")
        self.beta = beta
        super().__init__(model, optimizer, sync_every, process_group, f", beta={beta}")
        self._center = self._common = CommonParameters("EASGD", self._named, backup_device)

    def center_parameters(self) -> dict[str, Tensor]:
        """Return the center variable by name: the model to evaluate or save between rounds. They are no copies.

        Shape: as the model's parameters.
        """
        return self._center.by_name()

    def _combine(self, *, counting: tuple[int, ...]) -> None:
        alpha = self.beta / self.process_group.size()
        self._flat.take()
        away = self._flat.views[: len(self._parameters)]
        for view, center in zip(away, self._center.views, strict=True):
            view.sub_(center.to(view.device))
        self._flat.average(self.process_group, counting)
        # No collective from here on: what a lost peer could interrupt is over, and no parameter has changed yet.
        for buffer, mean in zip(self._buffers, self._flat.views[len(away) :], strict=True):
            buffer.copy_(mean)
        moves = self.process_group.rank() in counting
        for parameter, center, mean in zip(self._parameters, self._center.views, away, strict=True):
            if moves:
                parameter.sub_(parameter - center.to(parameter.device), alpha=alpha)
            center.add_(mean.to(center.device), alpha=alpha * len(counting))

    @torch.no_grad()
    def finish(self) -> None:
        """Stop counting steps and take part in the last rounds; afterwards all ranks have the center. All ranks call
        it.
        """
        super().finish()
        self._center.flat.give()

    def state_dict(self) -> dict[str, Any]:
        """Return the center, which is the same on all ranks, and this rank's position in its round.

        The ranks' models differ, so save each of them.
        """
        return {**super().state_dict(), "center_parameters": self._center.cloned()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. You load the model and the optimizer yourself.

        Raises:
            ValueError: it is of another model; nothing was changed.
        """
        self._center.check(state_dict["center_parameters"])
        self._center.load(state_dict["center_parameters"])
        super().load_state_dict(state_dict)
