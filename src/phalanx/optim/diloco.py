"""`DiLoCo` trains replicas separately for many steps; then an outer optimizer steps by the mean of their changes.

t      outer parameters, the same on all ranks
x_i    rank i's parameters after its inner steps from t

gradient of the outer optimizer = mean over i of (t - x_i)           its step computes the next t, and sets x_i = t
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.optim.outer import OuterParameters, check_optimizers
from phalanx.optim.rounds import Rounds, check_kinds


class DiLoCo(Rounds):
    """Step `outer_optimizer` by the ranks' mean parameter change, every `sync_every` steps of `inner_optimizer`.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with phalanx.DiLoCo(model, inner, outer, sync_every=500):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                inner.step()                            # every 500th also takes the outer step

    Collective calls, uneven ends and buffers are as in `LocalSGD`. With SGD of lr=1 and no momentum as the outer
    optimizer, the result is that of `LocalSGD`.

    Cost: per round, two all_reduces, of 8 bytes per rank and of the parameters' size, and the outer step on every rank.
    Memory: two more copies of the parameters, and the outer optimizer's state, on every rank.
    Numerics: bitwise identical on all ranks after each round.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (for example, those of the host) may wrap it.
        inner_optimizer, outer_optimizer: over the model's own parameters; the outer one over all that are trained.
        backup_device: the device of the outer parameters between rounds; None for the parameters' device.
        process_group: the ranks that train together; the default group if None.

    Raises:
        ValueError: an argument is invalid, or gradients of the same ranks are already averaged at every step.
        MismatchError: the ranks' arguments or models differ.
        PhalanxError: a rank died or timed out in a round: every parameter has its value from before the round.

    Source: Douillard et al. (2023), DiLoCo: Distributed Low-Communication Training of Language Models; the interface
    follows torchft.
    """

    _name = "DiLoCo"

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer,
        *,
        sync_every: int,
        backup_device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_kinds("DiLoCo", model, inner_optimizer, outer_optimizer)
        check_optimizers("DiLoCo", model, inner_optimizer, outer_optimizer)
        super().__init__(model, inner_optimizer, sync_every, process_group)
        self.outer_optimizer = outer_optimizer
        self._outer: OuterParameters = OuterParameters("DiLoCo", self._named, outer_optimizer, backup_device)

    def outer_parameters(self) -> dict[str, Tensor]:
        """Return the outer parameters by name, without copies: the model to evaluate or save between rounds.

        Shape: as the model's parameters.
        """
        return self._outer.by_name()

    def _combine(self, *, counting: tuple[int, ...]) -> None:
        self._flat.copy_in()
        moved = self._flat.views[: len(self._parameters)]
        self._outer.subtract(moved)
        self._flat.average(self.process_group, counting)
        # No collective follows: a lost peer can no longer interrupt the round, and no parameter has changed yet.
        for buffer, mean in zip(self._buffers, self._flat.views[len(moved) :], strict=True):
            buffer.copy_(mean)
        self._outer.step(moved)

    @torch.no_grad()
    def _catch_up_without_round(self, root: int) -> None:
        self._flat.copy_in()  # on the root, which has not stepped: the outer parameters, and its buffers
        self._flat.broadcast(self.process_group, root)
        self._flat.copy_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer parameters and optimizer, the same on all ranks, and this rank's step in its round."""
        return {**super().state_dict(), **self._outer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. The caller loads the model and the inner optimizer.

        Raises:
            ValueError: the state belongs to another model; nothing was changed.
        """
        self._outer.load_state_dict(state_dict)
        super().load_state_dict(state_dict)
