"""Read the options of an optimizer's parameter groups, and check the state of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer = Callable[[Any], Optimizer]  # from parameters, or from groups

_NOT_OPTIONS = ("params", "param_names")
# the entries of a parameter's state in torch.optim that have the parameter's shape
_LIKE_PARAMETER = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
    )
)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def find_misshapen(state: Mapping[str, Any], shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """Return the entries of a parameter's state that should have the parameter's `shape` but do not, by their shape."""
    return {
        key: tuple(value.shape)
        for key, value in state.items()
        if key in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != shape
    }
