"""The hooks that the reducer has on parameters and nodes, which autograd calls in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from phalanx._comm.backend.dynamo import untraced

_Owner = TypeVar("_Owner")
_Argument = TypeVar("_Argument")


def weak_hook(
    owner: weakref.ref[_Owner], call: Callable[[_Owner, _Argument], None], argument: _Argument
) -> Callable[[object], None]:
    """Return a hook that calls `call(owner, argument)` as long as the owner lives, and keeps nothing alive.

    It needs a gradient in `.grad` until backward ends, also in a distributed backward of `phalanx.rpc`.
    """

    @untraced
    def hook(_tensor_or_gradients: object) -> None:
        alive = owner()
        if alive is not None:
            call(alive, argument)

    hook.keeps_grad = True  # type: ignore[attr-defined]
    return hook


def is_last_hook(parameter: Tensor, hook_id: int) -> bool:
    """Return whether no other hook is called with the parameter's gradient after the one with this id."""
    hooks: dict[int, object] = parameter._post_accumulate_grad_hooks
    return next(reversed(hooks)) == hook_id


def register_gradient_hook(parameter: Tensor, hook: Callable[..., None]) -> Any:
    """Register a hook of a parameter's gradient, also where it is frozen for now: a wrapper that goes over to another
    group takes in what it had before.
    """
    trains = parameter.requires_grad
    parameter.requires_grad_()
    try:
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(trains)
