"""Build the user's optimizer over the slices that this rank updates."""

from __future__ import annotations

import types
from typing import Any

from torch.optim import Optimizer

from phalanx._comm.backend.dynamo import undecorated


def build_local(
    optimizer_class: type[Optimizer], group: dict[str, Any], defaults: dict[str, Any], *, cuts: bool
) -> Optimizer:
    """Return this rank's optimizer. One of torch's own, which `cuts`, skips its decorators: they import Dynamo."""
    if not cuts:
        return optimizer_class([group], **defaults)
    local = optimizer_class.__new__(optimizer_class)
    vars(local)["add_param_group"] = types.MethodType(undecorated(Optimizer.add_param_group), local)
    local.__init__([group], **defaults)  # type: ignore[misc]
    step = undecorated(optimizer_class.step)
    if not hasattr(step, "__wrapped__"):  # else somebody else has put something around it
        vars(local)["step"] = types.MethodType(Optimizer.profile_hook_step(step), local)
    return local
