"""Compute the loss of a model that has a `training_step` of its own, under a strategy's wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def loss_of_own_step(model: nn.Module, bare: nn.Module, batch: Any) -> Tensor:
    """Call `bare.training_step(batch)` through `model`, which must see a forward; return the result, or its "loss".

    `model` is the strategy's wrapper of `bare`, or `bare` itself.
    """
    forward, own = bare.forward, vars(bare).get("forward")

    def step(batch: Any) -> Any:
        bare.forward = forward
        result = bare.training_step(batch)  # type: ignore[operator]
        return result["loss"] if isinstance(result, Mapping) and "loss" in result else result

    bare.forward = step
    try:
        return model(batch)  # type: ignore[no-any-return]
    finally:
        vars(bare).pop("forward", None)
        if own is not None:  # the instance has its own forward, as torch.compile creates it
            bare.forward = own
