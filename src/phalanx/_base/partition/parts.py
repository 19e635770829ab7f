"""Divide a model into parts, and list the layers, tensors and exchanged values of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import fx, nn

from phalanx._base.partition.layers import Layer, LayerList


@dataclass(frozen=True)
class LayerRange:
    """A `LayerRange` is one part: consecutive layers. `receives` and `sends` map another part to exchanged nodes."""

    index: int
    layers: tuple[Layer, ...]
    receives: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    sends: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """The names of the modules that the layers call."""
    tensors: tuple[str, ...] = ()
    """The names of the parameters and buffers that forward itself uses, outside of any of these modules."""

    @property
    def nodes(self) -> list[fx.Node]:
        """Return the part's nodes, in execution order."""
        return [node for layer in self.layers for node in layer.nodes]


def split(layers: LayerList, counts: Sequence[int]) -> list[LayerRange]:
    """Divide `layers` into parts with `counts` layers. The first part has the model's arguments, the last its result.

    A value is sent directly to each part that needs it, even if that part is not the next one.

    Raises:
        ValueError: the counts do not add up to all layers, or a part would be empty.
    """
    if sum(counts) != len(layers.layers) or any(count < 1 for count in counts):
        raise ValueError(
            f"balance {list(counts)} does not cut {len(layers.layers)} layers into {len(counts)} parts of at least one"
        )
    ends = list(accumulate(counts))
    groups = [layers.layers[end - count : end] for count, end in zip(counts, ends, strict=True)]
    home = {node: 0 for node in layers.inputs}
    home.update({node: index for index, group in enumerate(groups) for layer in group for node in layer.nodes})
    last = len(groups) - 1
    readers: dict[fx.Node, set[int]] = {
        node: {last if user.op == "output" else home[user] for user in node.users} for node in home
    }
    return [
        LayerRange(
            index,
            group,
            receives={
                source: crossing
                for source in range(index)
                if (crossing := tuple(n for n in home if home[n] == source and index in readers[n]))
            },
            sends={
                target: crossing
                for target in range(index + 1, len(groups))
                if (crossing := tuple(n for n in home if home[n] == index and target in readers[n]))
            },
            modules=_modules(layers.root, group),
            tensors=_tensors(group, layers.output if index == last else None),
        )
        for index, group in enumerate(groups)
    ]


def _modules(root: nn.Module, group: Sequence[Layer]) -> tuple[str, ...]:
    called = (str(node.target) for layer in group for node in layer.nodes if node.op == "call_module")
    return tuple(dict.fromkeys(called))


def _tensors(group: Sequence[Layer], output: fx.Node | None) -> tuple[str, ...]:
    users = [node for layer in group for node in layer.nodes] + ([output] if output is not None else [])
    read = (str(node.target) for user in users for node in user.all_input_nodes if node.op == "get_attr")
    return tuple(dict.fromkeys(read))
