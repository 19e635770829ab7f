"""`place` measures, decides, moves, and lets forward bring every value to where it is needed."""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.nn.placement.devices import DeviceId, read_rooms
from phalanx.nn.placement.move import move
from phalanx.nn.placement.plan import Balance, Placement, decide_placement, memory_of
from phalanx.nn.placement.together import attribute, count_once, find_homes, read_by
from phalanx.nn.placement.transfers import insert_transfers
from phalanx.partition import LayerList, TracedConstants, given_arguments, list_layers, measure_layers

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class _Way:
    """It says how forward runs: the graph with its transfers as a function of the module, and what it was made from."""

    placement: Placement
    split_points: tuple[str, ...]
    given: tuple[str, ...]
    output: torch.device | None
    constants: TracedConstants
    run: Callable[..., Any]


class Placed(nn.Module):
    """`place` adds this to a module's class; the module is the same object, with the same names."""

    _phalanx_way: _Way

    @property
    def placement(self) -> Placement:
        """Return the placement, which says which layer is on which device."""
        return self._phalanx_way.placement

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, each layer on its device. Arguments may be on any device."""
        self._phalanx_way.constants.warn_of_changes(self, "phalanx.nn.place")
        return self._phalanx_way.run(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a copy, which is cut in the same way; what runs is made anew from its class's forward."""
        state = {name: value for name, value in self.__dict__.items() if name != "_phalanx_way"}
        way = self._phalanx_way
        recipe = (way.placement, way.split_points, way.given, way.output)
        return _begin_copy, (type(self).__mro__[2], recipe), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Do the second half of copying: the module is whole, and can be followed again."""
        placement, split_points, given, output = self.__dict__.pop("_phalanx_recipe")
        own = type(self).__mro__[2]
        assert issubclass(own, nn.Module)
        self.__class__ = own  # type: ignore[assignment]
        own.__setstate__(self, state)  # type: ignore[no-untyped-call]
        layers = list_layers(self, split_points, given=given)
        attach(self, layers, placement, (split_points, given, output))


def place(
    module: M,
    devices: Sequence[DeviceId] | Mapping[DeviceId, int | str],
    example: Any,
    *,
    balance: Balance = "memory",
    training: bool = True,
    optimizer_state: int = 0,
    split_points: Sequence[str] = (),
    output_device: DeviceId | None = None,
) -> M:
    """Distribute the layers of `module` over several devices of this process, as `.to(device)` does for one.

        model = phalanx.nn.place(model, ["cuda:0", "cuda:1"], (tokens,))
        model = phalanx.nn.place(model, {"cuda:0": "10 GiB", "cuda:1": "6 GiB"}, (tokens,), optimizer_state=2)
        print(model.placement)

    Each layer is run and measured by itself. Then `place` decides where to cut, and moves parameters and buffers. From
    then on forward moves every value to the device on which it is needed, and backward the gradients. The module
    stays the same object with the same names, so optimizers and checkpoints need no change, and it computes the same
    values as before.

    Arguments:
        devices: in the order of the layers; every device gets at least one layer. Or how much each device may hold, in
            bytes or as '10 GiB': then only as many are used as are needed to hold the model.
        example: arguments of forward, a tuple (or keyword arguments, a dict), of the size that will be used.
        balance: what to make equal on the devices, "memory" or "time"; or how many layers each gets.
        training: whether gradients and the activations for backward count as memory.
        optimizer_state: how many numbers the optimizer keeps for each parameter: 1 with momentum, 2 for Adam.
        split_points: dotted names of modules at which the model may be cut, too; by default its children, and those of
            every nn.Sequential.
        output_device: the device of the result; by default it stays where it was computed.

    Plain attributes that forward reads (numbers, strings, lists of them) keep the values that they have now. A forward
    after one was changed warns of it.

    Cost: four times forward and backward for measuring. Then one transfer for each value and each other device that
    needs it. The devices work one after another, so this gives more memory, not more speed (in `phalanx.Pipeline` they
    work at the same time).

    Raises:
        ValueError: the model cannot be traced, cut or fitted; the message names the layer.
        TypeError: it is not a module, or `devices` are not several.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"place takes an nn.Module, got a {type(module).__name__}")
    if isinstance(module, Placed):
        raise ValueError("place: the module is placed already; construct it again before you place it again")
    rooms = read_rooms(devices)
    args, kwargs = _arguments(example)
    given = tuple(given_arguments(module, example))
    layers = list_layers(module, split_points, given=given)
    _refuse_what_stays(layers)
    costs = count_once(layers, measure_layers(layers, args, kwargs))
    memory = [memory_of(cost, training=training, optimizer_state=optimizer_state) for cost in costs]
    placement = decide_placement(costs, memory, find_homes(layers, costs), _reads(layers), rooms, balance)
    output = None if output_device is None else torch.device(output_device)
    move(module, _devices_of_tensors(layers, placement))
    attach(module, layers, placement, (tuple(split_points), given, output))
    return module


def attach(
    module: nn.Module,
    layers: LayerList,
    placement: Placement,
    recipe: tuple[tuple[str, ...], tuple[str, ...], torch.device | None],
) -> None:
    """Have the forward of `module`, whose tensors are where `placement` says, bring values to where they are needed."""
    split_points, given, output = recipe
    tensors = _homes_of_attributes(layers, placement)
    graph = insert_transfers(layers, placement.devices, tensors, output)
    code = graph.python_code("self")
    name = f"<placed {type(module).__name__} {id(graph)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)  # tracebacks read it
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)  # torch.fx does the same
    module.__class__ = _placed_class(type(module))
    way = _Way(placement, split_points, given, output, layers.constants, namespace["forward"])
    object.__setattr__(module, "_phalanx_way", way)


def _placed_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(f"Placed{own.__name__}", (Placed, own), {"__module__": own.__module__})


def _begin_copy(own: type[nn.Module], recipe: tuple[Any, ...]) -> nn.Module:
    copied = _placed_class(own)
    module = copied.__new__(copied)
    module.__dict__["_phalanx_recipe"] = recipe
    return module


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _reads(layers: LayerList) -> dict[int, list[int]]:
    """Return for each layer the layers whose values it needs."""
    home = {node: index for index, layer in enumerate(layers.layers) for node in layer.nodes}
    return {
        index: sorted({home[s] for node in layer.nodes for s in node.all_input_nodes if s in home and home[s] != index})
        for index, layer in enumerate(layers.layers)
    }


def _devices_of_tensors(layers: LayerList, placement: Placement) -> dict[int, torch.device]:
    """Return where each parameter and buffer goes; those that no layer uses go to the first device."""
    devices: dict[int, torch.device] = {}
    for layer, device in zip(layers.layers, placement.devices, strict=True):
        for node in layer.nodes:
            if node.op == "call_module":
                called = layers.root.get_submodule(str(node.target))
                for tensor in (*called.parameters(), *called.buffers()):
                    devices.setdefault(id(tensor), device)
    for index, device in enumerate(placement.devices):
        for name in read_by(layers, index):
            devices.setdefault(id(attribute(layers, name)), device)
    for tensor in (*layers.root.parameters(), *layers.root.buffers()):
        devices.setdefault(id(tensor), placement.rooms[0].device)
    return devices


def _homes_of_attributes(layers: LayerList, placement: Placement) -> dict[str, torch.device]:
    """Return where the parameters and buffers are that forward itself uses; a constant is wherever it was made."""
    homes = {}
    for index in range(len(layers.layers)):
        for name in read_by(layers, index):
            tensor = attribute(layers, name)
            if isinstance(tensor, Tensor) and _is_registered(layers.root, name):
                homes[name] = tensor.device
    return homes


def _is_registered(root: nn.Module, name: str) -> bool:
    *path, last = name.split(".")
    owner = operator.attrgetter(".".join(path))(root) if path else root
    return last in owner._parameters or last in owner._buffers


def _refuse_what_stays(layers: LayerList) -> None:
    """Refuse a layer that cannot be moved, by name.

    Raises:
        ValueError: it keeps a tensor that is neither parameter nor buffer, or brings values to a device of its own.
    """
    for layer in layers.layers:
        for node in layer.nodes:
            if node.op == "call_module":
                called = layers.root.get_submodule(str(node.target))
                for name, inner in called.named_modules():
                    kept = [key for key, value in vars(inner).items() if isinstance(value, Tensor)]
                    if kept:
                        whose = f"{layer.name}.{name}" if name else layer.name
                        raise ValueError(
                            f"place: layer {whose!r} keeps the tensor {kept[0]!r}, which is neither a parameter nor a "
                            "buffer and would stay behind; make it one (register_buffer)."
                        )
            elif node.op == "call_method" and node.target in ("cuda", "cpu"):
                raise ValueError(
                    f"place: after layer {layer.name!r} forward calls .{node.target}(), which takes the value off the "
                    "device on which it is needed; leave that out."
                )
