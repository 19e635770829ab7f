"""Where a model can be cut, what its layers cost, and where to cut it."""

from phalanx.partition.balance import balance
from phalanx.partition.layers import Layer, LayerList, list_layers
from phalanx.partition.measure import LayerCost, measure_layers
from phalanx.partition.parts import Part, split
from phalanx.partition.program import Program

__all__ = [
    "Layer",
    "LayerCost",
    "LayerList",
    "Part",
    "Program",
    "balance",
    "list_layers",
    "measure_layers",
    "split",
]
