"""List a model's layers, between which it may be cut, and the values that are passed between layers.

An `nn.Sequential` is split into its children, and so is each `nn.Sequential` inside it. Another module's `forward` is
traced with torch.fx: each call of a child is a layer, with the operations after it up to the next call. So every value
that crosses a cut is known, including values that skip layers. The inside of a layer is not examined.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, bool, str, type(None))
_MOST_ITEMS = 32
_UNKNOWN = object()


@dataclass(frozen=True)
class Layer:
    """A `Layer` is a piece of a model that is never cut. `name` is the name of its module: 'encoder.3'."""

    name: str
    nodes: tuple[fx.Node, ...]


class TracedConstants:
    """`TracedConstants` are the numbers, strings and containers of them that forward read from modules.

    They are constants in the graph, so a later change has no effect.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the attributes that are read from modules in this context, which replaces a method of nn.Module."""
        read = self._read
        before = vars(nn.Module).get("__getattribute__")

        def note(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in _INTERNAL and name in object.__getattribute__(module, "__dict__"):
                read.setdefault((module, name), _copy_plain(value))
            return value

        nn.Module.__getattribute__ = note  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]

    def warn_of_changes(self, root: nn.Module) -> None:
        """Warn once about each attribute of the model `root` that has changed since the trace."""
        for (module, name), was in list(self._read.items()):
            now = _UNKNOWN if was is _UNKNOWN else _copy_plain(vars(module).get(name, _UNKNOWN))
            if was is _UNKNOWN or (now is not _UNKNOWN and _is_same(was, now)):
                continue
            del self._read[module, name]
            where = next((prefix for prefix, inner in root.named_modules() if inner is module), "")
            name = f"{where}.{name}" if where else name
            warnings.warn(
                f"Pipeline: self.{name} has changed since the model was cut. The change has no effect, because forward "
                f"was traced with {was!r:.80}. Make the attribute a buffer (register_buffer), read it in a child "
                "module, or cut the model again.",
                stacklevel=4,
            )


@dataclass(frozen=True)
class LayerList:
    """A `LayerList` has a model's layers in execution order; all values are nodes of `graph`."""

    root: nn.Module
    graph: fx.Graph
    layers: tuple[Layer, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of forward that are constants in the graph, with their values."""
    constants: TracedConstants = field(default_factory=TracedConstants)
    """Attributes of modules that are constants in the graph."""

    @property
    def inputs(self) -> list[fx.Node]:
        """Return the arguments of the model's forward."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> fx.Node:
        """Return the node whose argument is forward's result."""
        last: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return last

    @property
    def names(self) -> list[str]:
        """Return the names of the layers; the name of a layer that is called twice occurs twice."""
        return [layer.name for layer in self.layers]


def list_layers(module: nn.Module, split_points: Sequence[str] = (), *, given: Sequence[str] = ()) -> LayerList:
    """List the layers of `module`. A child that contains one of `split_points` is split, as an nn.Sequential is.

    Arguments:
        split_points: dotted names of modules at which the caller wants to cut.
        given: names of forward's arguments that callers pass, although they have a default value.

    Raises:
        ValueError: no module has the name of a split point, or forward depends on values and cannot be traced.
        TypeError: `module` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model to cut must be an nn.Module, got a {type(module).__name__}")
    known = dict(module.named_modules())
    if unknown := [name for name in split_points if name not in known]:
        raise ValueError(
            f"{type(module).__name__} has no module {unknown[0]!r} to cut at; its children are "
            f"{', '.join(name for name, _ in module.named_children()) or 'none'}"
        )
    plain = _is_plain_sequential(module)
    defaults = {} if plain else _defaults(module, given)
    constants = TracedConstants()
    graph = _chain(module) if plain else _trace(module, split_points, defaults, constants)
    return LayerList(module, graph, tuple(_group(graph)), defaults, constants)


def given_arguments(module: nn.Module, example: Any) -> list[str]:
    """Return the names of the arguments that `example` has: a tuple, a dict, or forward's first argument alone."""
    if example is None:
        return []
    if isinstance(example, Mapping):
        return list(example)
    names = list(inspect.signature(module.forward).parameters)
    return names[: len(example) if isinstance(example, tuple | list) else 1]


def _defaults(module: nn.Module, given: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of the arguments that callers do not pass; they are traced as constants."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in given
    }


def _is_plain_sequential(module: nn.Module) -> bool:
    """Return whether calling the module only runs its children one by one."""
    return type(module).forward is nn.Sequential.forward and not _hooks(module)


def _hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, kind)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _chain(module: nn.Module) -> fx.Graph:
    """Return the graph of an nn.Sequential, without running anything."""
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name in _leaves(module, ""):
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


def _leaves(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module._modules.items():  # named_children would list a repeated layer only once
        if child is None:
            continue
        if _is_plain_sequential(child):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


class _Tracer(fx.Tracer):
    """A `_Tracer` traces into the given modules, and into every plain nn.Sequential; all other modules are leaves.

    Buffers are values of the graph, too: as constants they would keep their current content.
    """

    proxy_buffer_attributes = True

    def __init__(self, entered: set[str]) -> None:
        super().__init__()
        self._entered = entered
        self._switches = _switches()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node as torch.fx does; raise if forward has switched gradients or autocast, which a graph lacks."""
        if _switches() != self._switches:
            raise RuntimeError("forward turns gradients or autocast on or off, which a graph cannot record")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (module_qualified_name in self._entered or _is_plain_sequential(m))


def _switches() -> tuple[Any, ...]:
    """Return whether gradients, inference mode and autocast are on."""
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _trace(module: nn.Module, split_points: Sequence[str], defaults: dict[str, Any], read: TracedConstants) -> fx.Graph:
    entered = {".".join(name.split(".")[:depth]) for name in split_points for depth in range(1, name.count(".") + 1)}
    hooked = [name for name in ["", *sorted(entered)] if _hooks(module.get_submodule(name))]
    if hooked:
        raise ValueError(
            f"{_called(module, hooked[0])} has hooks, which a cut would remove; register them on its layers"
        )
    graphs, texts, constants = [], [], []
    for training in (True, False):
        before = set(vars(module))
        with _mode(module, training), _refused_changes(module), read.recorded():
            graphs.append(_trace_once(module, entered, defaults))
        made = [name for name in vars(module) if name not in before]  # tensors that forward creates
        texts.append(_without_names(graphs[-1], made))
        constants.append([getattr(module, name) for name in made])
    for name in made:
        delattr(module, name)  # of the second graph, which is not used
    train = graphs[0]
    if any(not _same(one, other) for one, other in zip(*constants, strict=False)):
        raise ValueError(
            f"{type(module).__name__} cannot be cut: its forward creates a tensor whose values differ between calls "
            "(random numbers?), but the traced graph would create it only once. Create it in a child module."
        )
    if texts[0] != texts[1]:
        raise ValueError(
            f"{type(module).__name__} cannot be cut: its forward depends on self.training, which is known only at run "
            "time. Use modules that read their own mode (nn.Dropout instead of F.dropout), or move the split points."
        )
    return train


@contextlib.contextmanager
def _refused_changes(module: nn.Module) -> Iterator[None]:
    """Undo forward's changes to attributes of its modules; after a change or an error, also remove what it has added.

    Raises:
        ValueError: forward has changed an attribute; the change is undone.
    """
    places = [
        (name, values)
        for name, inner in module.named_modules()
        for values in (vars(inner), inner._buffers, inner._parameters)
    ]
    before: list[dict[str, Any]] = [dict(values) for _, values in places]
    changed: list[str] = []
    is_traced = False
    try:
        yield
        is_traced = True
    finally:
        for (name, values), was in zip(places, before, strict=True):
            for key, value in was.items():
                if values.get(key) is not value:
                    values[key] = value
                    changed.append(f"{name}.{key}" if name else key)
        if changed or not is_traced:  # else the graph uses the tensors that forward has created
            for (_, values), was in zip(places, before, strict=True):
                for key in values.keys() - was.keys():
                    del values[key]
    if changed:
        raise ValueError(
            f"{type(module).__name__} cannot be cut: its forward sets self.{changed[0]}, which would happen only "
            "once, during tracing. Set it in a child module."
        )


def _without_names(graph: fx.Graph, constants: Sequence[str]) -> str:
    """Return the graph as text, with the same names of constants in every trace."""
    text = str(graph)
    for number, name in enumerate(constants):
        text = re.sub(rf"\b{re.escape(name)}\b", f"constant {number}", text)
    return text


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (not isinstance(one, torch.Tensor) or torch.equal(one, other))


def _trace_once(module: nn.Module, entered: set[str], defaults: dict[str, Any]) -> fx.Graph:
    tracer = _Tracer(entered)
    try:
        return tracer.trace(module, defaults)
    except Exception as error:  # torch.fx's own, or any error of forward without a real tensor
        raise ValueError(
            f"{type(module).__name__} cannot be cut: torch.fx could not follow its forward "
            f"({type(error).__name__}: {_first_line(error)}). Its control flow must not depend on values: move such "
            "code into a child module, which is not traced, or write the model as an nn.Sequential."
        ) from error


class _mode:
    """A `_mode` context sets every module of `module` to training or evaluation mode, and restores the modes."""

    def __init__(self, module: nn.Module, training: bool) -> None:
        self._was = [(m, m.training) for m in module.modules()]
        self._training = training

    def __enter__(self) -> None:
        for module, _ in self._was:
            module.training = self._training

    def __exit__(self, *exc: object) -> None:
        for module, training in self._was:
            module.training = training


def _group(graph: fx.Graph) -> Iterator[Layer]:
    """Yield each call of a module with the operations after it; operations before the first call belong to it."""
    nodes: list[fx.Node] = []
    name = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):  # a parameter is read where it is used
            continue
        if node.op == "call_module":
            if name:
                yield Layer(name, tuple(nodes))
                nodes = []
            name = str(node.target)
        nodes.append(node)
    if nodes:
        yield Layer(name or "forward", tuple(nodes))


def _copy_plain(value: Any, depth: int = 3) -> Any:
    """Return a copy of a small plain value, which is compared in every step; `_UNKNOWN` for other values."""
    if type(value) in _PLAIN:
        return value
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_ITEMS or not depth:
        return _UNKNOWN
    items = [_copy_plain(item, depth - 1) for item in (value.values() if type(value) is dict else value)]
    if any(item is _UNKNOWN for item in items):
        return _UNKNOWN
    return dict(zip(value, items, strict=True)) if type(value) is dict else type(value)(items)


def _is_same(was: Any, now: Any) -> bool:
    return type(was) is type(now) and repr(was) == repr(now)  # a NaN is not equal to itself


def _called(module: nn.Module, name: str) -> str:
    return f"module {name!r}" if name else type(module).__name__


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
