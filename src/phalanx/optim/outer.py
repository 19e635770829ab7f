"""Keep DiLoCo's outer parameters, the same on all ranks, and step them with the ranks' mean change as the gradient.

t      outer parameters
x_i    rank i's parameters after its inner steps from t

gradient of the outer optimizer = mean over i of (t - x_i)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.optim.flat import Flat


def check_optimizers(name: str, model: nn.Module, inner: Optimizer, outer: Optimizer) -> None:
    """Refuse identical optimizers, and an outer optimizer that cannot step or holds the wrong parameters.

    Raises:
        ValueError: an optimizer is refused; the message says why.
    """
    if inner is outer:
        raise ValueError(f"{name}: the inner and the outer optimizer must be two objects, each with its own state")
    if reason := _find_why_it_cannot_step(outer):
        raise ValueError(
            f"{name}: {type(outer).__name__} cannot be the outer optimizer: {reason}. Use SGD with Nesterov momentum, "
            "as the DiLoCo paper does, or another optimizer whose step needs only dense gradients"
        )
    held = {id(parameter) for group in outer.param_groups for parameter in group["params"]}
    missing = [of for of, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"{name}: the outer optimizer does not hold parameter {missing[0]!r}, which would never change. Build "
            "it from model.parameters(), like the inner optimizer"
        )
    own = {id(parameter) for parameter in model.parameters()}
    for group in outer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"{name}: the outer optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's, and would step it with the inner optimizer's gradients. Build it from model.parameters()"
                )


def _find_why_it_cannot_step(outer: Optimizer) -> str | None:
    if isinstance(outer, torch.optim.SparseAdam):
        return "it takes only sparse gradients, but the outer gradient is dense"
    # The class is checked, since a scheduler replaces the instance's `step`.
    _, *arguments = inspect.signature(type(outer).step).parameters.values()
    if any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in arguments):
        return "its step needs a closure that computes the loss again, but the outer gradient is not a loss's gradient"
    return None


class OuterParameters:
    """`OuterParameters` are copies of the model's parameters, the same on all ranks, that `optimizer` updates.

    The optimizer itself was built over the model's own parameters.
    """

    def __init__(
        self,
        caller: str,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizer: Optimizer,
        device: torch.device | str | None,
    ) -> None:
        self._caller = caller
        self._names = [name for name, _ in named]
        self._parameters: list[Tensor] = [parameter for _, parameter in named]
        self._optimizer = optimizer
        self._flat = Flat(self._parameters, device=torch.device(device) if device else None)
        self._flat.copy_in()

    def by_name(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._flat.views, strict=True))

    def subtract(self, views: Sequence[Tensor]) -> None:
        """Replace `views`, copies of the parameters, by the negative change since the last round: t - x."""
        for outer, view in zip(self._flat.views, views, strict=True):
            torch.sub(outer.to(view.device), view, out=view)

    def step(self, means: Sequence[Tensor]) -> None:
        """Take one step with `means`, the ranks' mean of t - x, as gradients; the model also gets the result."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._flat.copy_out()
        try:
            for parameter, mean in zip(self._parameters, means, strict=True):
                parameter.grad = mean
            self._optimizer.step()
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        self._flat.copy_in()

    def share(self, root: int, group: dist.ProcessGroup) -> None:
        """Overwrite the copies, and the optimizer's state, with `root`'s. All ranks call it."""
        for block in self._flat.blocks:
            sent = block.to(self._parameters[0].device)
            dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, group=group, group_src=root)
            block.copy_(sent)
        state = [self._optimizer.state_dict()]
        dist.broadcast_object_list(state, group=group, group_src=root)
        if group.rank() != root:
            self._optimizer.load_state_dict(state[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on all ranks."""
        return {
            "outer_parameters": {name: value.clone() for name, value in self.by_name().items()},
            "outer_optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: the state belongs to another model; nothing was changed.
        """
        mine, saved = self.by_name(), state_dict["outer_parameters"]
        differing = [name for name in mine.keys() | saved.keys() if _shape(mine, name) != _shape(saved, name)]
        if differing:
            name = min(differing)
            raise ValueError(
                f"{self._caller}: the state has parameter {name!r} with shape {_shape(saved, name)}, the model with "
                f"{_shape(mine, name)}"
            )
        self._optimizer.load_state_dict(state_dict["outer_optimizer"])
        for name, value in mine.items():
            value.copy_(saved[name])


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
