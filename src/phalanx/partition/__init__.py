"""Find where a model can be cut, measure what its layers cost, and decide where to cut it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "Layer": "phalanx.partition.layers",
    "LayerCost": "phalanx.partition.measure",
    "LayerList": "phalanx.partition.layers",
    "Part": "phalanx.partition.parts",
    "Program": "phalanx.partition.program",
    "TracedConstants": "phalanx.partition.constants",
    "balance": "phalanx.partition.balance",
    "bind": "phalanx.partition.measure",
    "given_arguments": "phalanx.partition.layers",
    "list_layers": "phalanx.partition.layers",
    "measure_layers": "phalanx.partition.measure",
    "split": "phalanx.partition.parts",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from phalanx.partition.balance import balance as balance
    from phalanx.partition.constants import TracedConstants as TracedConstants
    from phalanx.partition.layers import Layer as Layer
    from phalanx.partition.layers import LayerList as LayerList
    from phalanx.partition.layers import given_arguments as given_arguments
    from phalanx.partition.layers import list_layers as list_layers
    from phalanx.partition.measure import LayerCost as LayerCost
    from phalanx.partition.measure import bind as bind
    from phalanx.partition.measure import measure_layers as measure_layers
    from phalanx.partition.parts import Part as Part
    from phalanx.partition.parts import split as split
    from phalanx.partition.program import Program as Program


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
