"""Find the parameters that an optimizer would train without a saved state, while other parameters have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from phalanx._base.partition.owners import whole_name

_SHOWN = 4


def describe_gap(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
    """Return a sentence on the trained parameters that have no state in `saved`; "" if all have one.

    `load_state_dict` silently accepts an incomplete state; the other parameters would start from scratch.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    known = [name for group in saved.get("param_groups", ()) for name in group.get("param_names", group["params"])]
    names = [whole_name(parameter) or name for parameter, name in zip(parameters, known, strict=False)]
    trained = [
        (number, name)
        for number, name, parameter in zip(numbers, names, parameters, strict=False)
        if parameter.requires_grad
    ]
    missing = [name for number, name in trained if number not in saved.get("state", {})]
    if not missing or (len(missing) == len(trained) and not _stores_state(optimizer)):
        return ""
    if len(missing) == len(trained):
        return "has no state in it: it was saved before its first step, or without its state, and starts anew."
    shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
    return (
        f"has no state for {len(missing)} of {len(trained)} parameters ({shown}), which start anew: they had no "
        "gradient until then, or their state was left out."
    )


def _stores_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to keep a state for every parameter that it has updated."""
    inner = getattr(optimizer, "optim", optimizer)  # the optimizer inside a ZeroRedundancyOptimizer
    if isinstance(inner, torch.optim.SGD):
        return any(group["momentum"] for group in inner.param_groups)
    return type(inner).__module__.startswith("torch.optim")
