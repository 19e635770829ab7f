"""Run some layers of a model node by node, and free every value after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx, nn

from phalanx._base.partition.layers import Layer

_NOTHING = nullcontext()


class LayerProgram:
    """A `LayerProgram` runs prepared layers repeatedly. `at` is the layer that is running, or ran last."""

    def __init__(
        self, root: nn.Module, layers: Iterable[Layer], results: Iterable[fx.Node], marked: Collection[fx.Node] = ()
    ) -> None:
        """Prepare the layers to compute `results`. `root` has the modules and tensors by name.

        `marked` has the nodes that run in the context that is passed to `run`.
        """
        self._root = root
        self._results = tuple(results)
        steps = [(layer.name, node) for layer in layers for node in layer.nodes]
        last_use = {source: at for at, (_, node) in enumerate(steps) for source in node.all_input_nodes}
        self._steps: list[
            tuple[str, fx.Node, Callable[..., Any], tuple[fx.Node, ...], tuple[fx.Node, ...], bool, bool]
        ] = [
            (
                name,
                node,
                _function(root, node),
                tuple(node.all_input_nodes),
                tuple(n for n in node.all_input_nodes if last_use[n] == at and n not in self._results),
                _is_simple(node),
                node in marked,
            )
            for at, (name, node) in enumerate(steps)
        ]
        self.at = steps[0][0] if steps else ""
        self.running = False
        """Whether a layer is running, which is then the source of an error."""

    def run(
        self, values: Mapping[fx.Node, Any], inside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> dict[fx.Node, Any]:
        """Compute the results from the input values. Marked nodes run in a context of `inside()`."""
        env = dict(values)
        self.running = True  # and stays so if a layer raises
        for name, node, function, arguments, done, simple, is_marked in self._steps:
            self.at = name
            with inside() if is_marked else _NOTHING:
                if simple:
                    env[node] = function(*[env[argument] for argument in arguments])
                else:
                    args, kwargs = self._arguments(node, env)
                    env[node] = function(*args, **kwargs)
                    del args, kwargs
            for source in done:
                env.pop(source, None)
        self.running = False
        return {node: env[node] if node in env else self._read(node) for node in self._results}

    def _arguments(self, node: fx.Node, env: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            fx.node.map_arg(node.args, lambda n: env[n] if n in env else self._read(n)),
            fx.node.map_arg(node.kwargs, lambda n: env[n] if n in env else self._read(n)),
        )

    def _read(self, node: fx.Node) -> Any:
        """Return a parameter or buffer that forward itself uses."""
        assert node.op == "get_attr", f"{node} has no value yet"
        return operator.attrgetter(str(node.target))(self._root)


def _is_simple(node: fx.Node) -> bool:
    """Return whether the node's arguments are distinct values and nothing else, so that `map_arg` is not needed."""
    plain = all(isinstance(argument, fx.Node) and argument.op != "get_attr" for argument in node.args)
    return plain and not node.kwargs and len(node.args) == len(node.all_input_nodes)


def _function(root: nn.Module, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        return _method(str(node.target))
    assert node.op == "call_function"
    assert callable(node.target)
    return node.target


def _method(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call
