"""Compute the loss of a strategy's step from a user's loss function, or from a model's own training_step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

LossFn = Callable[[Any, Any], Tensor]
LossOf = Callable[[nn.Module, Any], Tensor]


def loss_of_model(loss_fn: LossFn) -> LossOf:
    """Return a function that computes the loss of a batch (*model arguments, target)."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        *inputs, target = require_pair(batch)
        return loss_fn(model(*inputs), target)

    return loss_of


def require_pair(batch: Any) -> Sequence[Any]:
    """Return `batch` if it is a sequence (*model arguments, target).

    Raises:
        TypeError: the batch is not a tuple or list of at least two elements, but a dict or a tensor, for example.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(
            f"a batch is a {type(batch).__name__}{size}; a loss function needs the model's arguments followed by "
            "the target: (inputs, target). For other batches, give the model a training_step(batch), and no loss"
        )
    return batch


def loss_of_training_step(model: nn.Module, bare: nn.Module, batch: Any) -> Tensor:
    """Call `bare.training_step(batch)` as the forward of `model`; return the result, or the result's "loss".

    `model` is the strategy's wrapper of `bare`, which acts only in a forward, or `bare` itself.
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
        if own is not None:  # the instance had a forward of its own, as torch.compile creates it
            bare.forward = own


def not_a_loss(loss: object) -> Exception:
    """Return the error for an invalid result of a loss function or a training_step."""
    if not isinstance(loss, Tensor):
        return TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor of one element, to differentiate")
    if loss.numel() != 1:
        return ValueError(
            f"the loss has shape {tuple(loss.shape)}: it must be one number, the mean over the samples: "
            "reduction='mean', or loss.mean()"
        )
    return ValueError(
        "the loss depends on no trained parameter: all parameters of the model are frozen (requires_grad=False), or "
        "the loss was detached or computed under no_grad"
    )
