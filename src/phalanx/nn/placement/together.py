"""Find the layers that must be on one device: those that share a parameter or a buffer, which is in one place only."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from phalanx.partition import LayerCost, LayerList


def find_homes(layers: LayerList, costs: Sequence[LayerCost]) -> list[int]:
    """Return for each layer the first one with which it has to be; itself, if it is free.

    Layers whose modules share a tensor are together (tied weights, a module that is called twice). A tensor that
    forward itself uses travels to the layer that needs it, unless it is larger than what that layer hands on: then the
    layer goes where the tensor is.
    """
    homes = list(range(len(layers.layers)))
    first_with: dict[int, int] = {}
    for index in range(len(layers.layers)):
        for tensor in _tensors_of(layers, index):
            _join(homes, first_with.setdefault(id(tensor), index), index)
    for index in range(len(layers.layers)):
        for name in read_by(layers, index):
            value = attribute(layers, name)
            if isinstance(value, Tensor):
                home = first_with.setdefault(id(value), index)
                if value.numel() * value.element_size() > costs[index].output_bytes:
                    _join(homes, home, index)
    return [_root(homes, index) for index in range(len(homes))]


def count_once(layers: LayerList, costs: Sequence[LayerCost]) -> list[LayerCost]:
    """Return the costs, with each parameter counted in the first layer that has it."""
    seen: set[int] = set()
    counted = []
    for index, cost in enumerate(costs):
        held: list[object] = [
            *_tensors_of(layers, index),
            *(attribute(layers, name) for name in read_by(layers, index)),
        ]
        parameters = {id(t): t.numel() * t.element_size() for t in held if isinstance(t, nn.Parameter)}
        again = sum(size for key, size in parameters.items() if key in seen)
        seen.update(parameters)
        counted.append(replace(cost, parameter_bytes=max(0, cost.parameter_bytes - again)))
    return counted


def _tensors_of(layers: LayerList, index: int) -> list[Tensor]:
    """Return the parameters and buffers of the modules that the layer calls."""
    modules = [layers.root.get_submodule(str(n.target)) for n in layers.layers[index].nodes if n.op == "call_module"]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def read_by(layers: LayerList, index: int) -> list[str]:
    """Return the names of tensors that the layer uses outside of any module."""
    sources = (source for node in layers.layers[index].nodes for source in node.all_input_nodes)
    return list(dict.fromkeys(str(source.target) for source in sources if source.op == "get_attr"))


def attribute(layers: LayerList, name: str) -> object:
    """Return what the model has under a dotted name."""
    value: object = operator.attrgetter(name)(layers.root)
    return value


def _root(homes: list[int], index: int) -> int:
    while homes[index] != index:
        index = homes[index]
    return index


def _join(homes: list[int], one: int, other: int) -> None:
    first, second = sorted((_root(homes, one), _root(homes, other)))
    homes[second] = first
