"""Measure the cost of each layer of a model by running it: time of forward and backward, and memory."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from phalanx._base.partition.layers import Layer, LayerList
from phalanx._base.partition.program import LayerProgram
from phalanx._base.torch_names import find

tree_flatten: Any = find("torch.utils._pytree.tree_flatten", loses="layers are not measured")
tree_map: Any = find("torch.utils._pytree.tree_map", loses="layers are not measured")
_ROUNDS = 3


@dataclass(frozen=True)
class LayerCost:
    """A `LayerCost` is one layer's cost for one micro-batch. `saved_bytes` are saved in forward for backward."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    saved_bytes: int

    @property
    def seconds(self) -> float:
        """Return the time of forward and backward."""
        return self.forward_s + self.backward_s


def measure_layers(layers: LayerList, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[LayerCost]:
    """Run every layer on the results of the previous layers, and return its cost: the shortest times of three rounds.

    Layers on the meta device get memory for the measurement. Parameters, gradients, buffers and random states do not
    change.

    Cost: four forward and backward passes of the model, in this thread; memory for the values between layers.

    Raises:
        ValueError: the arguments do not match forward's.
    """
    values = bind(layers, args, kwargs or {})
    costs = []
    gpus = sorted({one.device.index for one in layers.root.parameters() if one.is_cuda})
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):
        for layer in layers.layers:
            cost, results = _measure(layers.root, layer, values)
            costs.append(cost)
            values.update(results)
    return costs


def bind(layers: LayerList, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
    """Bind values to forward's arguments.

    Raises:
        ValueError: there are too many arguments; or an argument is missing or unknown, or differs from its default,
            which is a constant in the graph.
    """
    names = [str(node.target) for node in layers.inputs]
    if layers.defaults:  # torch.fx renames them
        names = list(inspect.signature(layers.root.forward).parameters)[: len(names)]
    if len(args) > len(names):
        raise ValueError(
            f"{type(layers.root).__name__}.forward takes {len(names)} argument{'s' * (len(names) != 1)} "
            f"({', '.join(names)}), got {len(args)}. (To a Pipeline's step, pass the target by name: target=.)"
        )
    given = dict(zip(names, args, strict=False))
    if wrong := [name for name in kwargs if name not in names or name in given]:
        raise ValueError(
            f"{type(layers.root).__name__} got unknown or repeated argument {wrong[0]!r}; it takes {', '.join(names)}"
        )
    given.update(kwargs)
    for name, default in layers.defaults.items():
        if name in given and not _is_default(given[name], default):
            raise ValueError(
                f"{type(layers.root).__name__}: the argument {name!r} is fixed to its default, {default!r}, because "
                f"the example for the cut has no value for it. Add a value: example=dict(x=..., {name}=...), or a "
                "longer tuple"
            )
    values = {}
    for node, name in zip(layers.inputs, names, strict=True):
        if name in given:
            values[node] = given[name]
        elif node.args:  # the node has its default
            values[node] = node.args[0]
        else:
            raise ValueError(f"{type(layers.root).__name__} needs the argument {name!r}")
    return values


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and value == default)


def _measure(root: nn.Module, layer: Layer, values: Mapping[fx.Node, Any]) -> tuple[LayerCost, dict[fx.Node, Any]]:
    module = _Own(root, layer)
    wanted = [node for node in layer.nodes if any(user not in layer.nodes for user in node.users)] or layer.nodes[-1:]
    program = LayerProgram(module, [layer], wanted)
    reads = {source for node in layer.nodes for source in node.all_input_nodes if source in values}
    parameters = [p for p in module.parameters() if p.requires_grad]
    tensors = [*parameters, *tree_flatten([values[node] for node in reads])[0]]
    used = {t.device for t in tensors if isinstance(t, Tensor)}
    forward, backward, saved, results = [], [], 0, {}
    for turn in range(_ROUNDS + 1):
        given = {node: tree_map(_leaf, values[node]) for node in reads}
        inputs = {
            node: tree_map(_copy, value) for node, value in given.items()
        }  # a layer may change its input in place
        saved_bytes: dict[int, int] = {}
        began = _clock(used)
        if turn:
            results = program.run(inputs)
        else:  # the first round warms up, and measures memory
            held = {p.untyped_storage().data_ptr() for p in module.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(_note(saved_bytes, held), lambda tensor: tensor):
                results = program.run(inputs)
            saved = sum(saved_bytes.values())
        forward.append(_clock(used) - began)
        outputs = [t for t in tree_flatten(list(results.values()))[0] if isinstance(t, Tensor) and t.requires_grad]
        leaves = [t for t in tree_flatten(list(given.values()))[0] if isinstance(t, Tensor) and t.requires_grad]
        grads = [torch.ones_like(output) for output in outputs]
        began = _clock(used)
        if outputs and (leaves or parameters):
            torch.autograd.grad(outputs, [*leaves, *parameters], grads, allow_unused=True)
        backward.append(_clock(used) - began)
    detached = {node: tree_map(_detached, value) for node, value in results.items()}
    cost = LayerCost(
        layer.name,
        min(forward[1:]),
        min(backward[1:]),
        sum(_nbytes(p) for p in module.parameters()),
        saved,
    )
    return cost, detached


def _clock(devices: Iterable[torch.device]) -> float:
    """Return the time after synchronising the devices, which run asynchronously."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
    return time.perf_counter()


class _Own(nn.Module):
    """An `_Own` module is a copy of one layer's modules and tensors, so that measuring does not change the model.

    The copy has memory even if the model is on the meta device.
    """

    def __init__(self, root: nn.Module, layer: Layer) -> None:
        super().__init__()
        for node in layer.nodes:
            if node.op == "call_module":
                self._put(str(node.target), _real(copy.deepcopy(root.get_submodule(str(node.target)))))
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    self._put(str(source.target), _attribute(root, str(source.target)))

    def _put(self, name: str, value: Any) -> None:
        *path, last = name.split(".")
        at: nn.Module = self
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, nn.Module())
            at = getattr(at, step)
        if not hasattr(at, last):
            setattr(at, last, value)


def _attribute(root: nn.Module, name: str) -> Any:
    value: Any = root
    for step in name.split("."):
        value = getattr(value, step)
    if isinstance(value, nn.Parameter):
        data = torch.zeros_like(value, device="cpu") if value.is_meta else value.detach().clone()
        return nn.Parameter(data, value.requires_grad)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _real(module: nn.Module) -> nn.Module:
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = module.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    return module


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _note(seen: dict[int, int], parameters: set[int]) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    return pack
