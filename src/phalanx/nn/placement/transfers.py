"""Insert transfers into the model's graph: a value that is needed on another device is brought there, once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.partition import LayerList
from phalanx.torch_names import find

tree_map: Any = find(
    "torch.utils._pytree.tree_map", loses="layers that are placed on several devices do not move their inputs"
)

# These functions make a tensor from nothing where the default device is, whatever calls them.
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
        "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
    )
)  # fmt: skip


_AS_THEY_ARE = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range, type(None))


def transfer(value: Any, device: torch.device, source: str) -> Any:
    """Return `value`, which comes from layer `source`, on `device`; in a list, tuple or dict every tensor is moved.

    What is there already stays. Backward brings the gradient the other way. From one accelerator to another nothing
    waits; else this waits until it is there.

    Raises:
        TypeError: it is something whose tensors are not known.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.device.type == device.type != "cpu")
    if isinstance(value, _AS_THEY_ARE):
        return value
    if callable(getattr(value, "to", None)):  # it may be a packed sequence, or a batch of a tokenizer
        return value.to(device)
    if isinstance(value, list | tuple | dict):
        return tree_map(lambda item: transfer(item, device, source), value)
    raise TypeError(
        f"place: {source} gives a {type(value).__name__}, of which it is not known how to bring it to {device}. "
        "Tensors, and lists, tuples and dicts of them, can cross; or let both layers be on one device (balance=[...])."
    )


def insert_transfers(
    layers: LayerList, devices: Sequence[torch.device], tensors: dict[str, torch.device], output: torch.device | None
) -> fx.Graph:
    """Return the graph of `layers`, layer `i` of which is on `devices[i]`.

    Arguments:
        tensors: where the parameters and buffers are that forward uses itself.
        output: where the result goes; None: it stays where it is made.
    """
    device_of = {node: devices[i] for i, layer in enumerate(layers.layers) for node in layer.nodes}
    named = {node: f"layer {layer.name!r}" for layer in layers.layers for node in layer.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    where: dict[fx.Node, torch.device | None] = {}  # None: wherever the caller has it
    brought: dict[tuple[fx.Node, torch.device], fx.Node] = {}

    def bring(node: fx.Node, device: torch.device) -> fx.Node:
        if where[node] == device:
            return copies[node]
        if (node, device) not in brought:
            source = named.get(node, f"{node.target!r}")
            brought[node, device] = graph.call_function(transfer, (copies[node], device, source))
        return brought[node, device]

    for node in layers.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
            where[node] = tensors.get(str(node.target)) if node.op == "get_attr" else None
        elif node.op == "output":
            graph.node_copy(node, copies.__getitem__ if output is None else lambda n: bring(n, output))
        else:
            device = device_of[node]
            copies[node] = graph.node_copy(node, partial(bring, device=device))
            made_elsewhere = node.op == "call_function" and node.target in _FACTORIES
            where[node] = None if made_elsewhere else device
    graph.lint()
    return graph
