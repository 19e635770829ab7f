"""A parameter group of an optimizer: its parameters and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

MakeOptimizer = Callable[[Any], Optimizer]  # from parameters, or from groups

_NOT_OPTIONS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
