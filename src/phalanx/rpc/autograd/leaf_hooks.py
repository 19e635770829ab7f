"""Call the hooks of AccumulateGrad nodes in a backward pass that gathers gradients in a context, not in `.grad`.

    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # torch's AccumulateGrad
    node.register_prehook(before)  # before((gradient,)): may replace the gradient
    node.register_hook(after)      # after((), (gradient,)): the context has the gradient by then

The engine does not run these nodes: it captures their inputs. But just before that, it calls the hooks of the leaf
itself (`Tensor.register_hook`). So each leaf gets one more such hook during a run, after the user's own. This hook does
the same as PyTorch's distributed engine: it calls the node's prehooks, gathers the gradient, and calls the node's
hooks. Prehooks and hooks are also called with a gradient of None.

Hooks that need the gradient in `.grad` (`register_post_accumulate_grad_hook`) find it there, and the gradient that they
leave there is gathered. `.grad` is set only while these hooks run, so that a pass that waits for other workers blocks
no other pass. Hooks that need `.grad` until the pass ends, as in DistributedDataParallel, have an attribute
`keeps_grad`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx._base.torch_names import find

_backward_number: Any = find(
    "torch._C._current_graph_task_id", loses="distributed backwards of phalanx.rpc do not call hooks of leaves"
)

Hooks = Mapping[int, Callable[..., Any]]
_KEY = "phalanx.rpc: hooks"
_node_hooks_lock = threading.Lock()
# Code that sets `.grad` of this process's tensors owns this lock: the hooks of a leaf, a pass, or an optimizer's step.
# It is reentrant, because a hook may run another pass or step.
grads_are_ours = threading.RLock()
_register_hook_lock = threading.Lock()


class Begin(torch.autograd.Function):
    """`Begin` is the node that the engine runs first: it reports the id of the engine's graph task."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.on_run(_backward_number())
        return None


def node_hooks(node: Any) -> tuple[Hooks, Hooks]:
    """Return the dictionaries of an AccumulateGrad node's prehooks and hooks; hooks registered later appear in them.

    PyTorch has no API for this: register a hook, get the dictionary from the hook's handle, and remove the hook.
    Cost: 4 µs for the first call on a node, almost nothing later.
    """
    found: tuple[Hooks, Hooks] | None = node.metadata.get(_KEY)
    if found is None:
        with _node_hooks_lock:  # otherwise two threads could create two dictionaries
            before, after = node.register_prehook(_ignore), node.register_hook(_ignore)
            found = node.metadata[_KEY] = before.hooks_dict_ref(), after.hooks_dict_ref()
            before.remove()
            after.remove()
    return found


def keeps_grad(variable: Tensor) -> bool:
    """Return whether a hook of the leaf has `keeps_grad`: it needs the gradient in `.grad` until the pass ends."""
    hooks = variable._post_accumulate_grad_hooks
    return bool(hooks) and any(getattr(hook, "keeps_grad", False) for hook in hooks.values())


def _ignore(*_: Any) -> None:
    """Do nothing: this hook is removed at once."""


class _Leaf:
    """A `_Leaf` is a leaf during one run, with the hooks of its AccumulateGrad node and the hooks that need `.grad`."""

    def __init__(self, node: Any, hooks: tuple[Hooks, Hooks]) -> None:
        self.variable: Tensor = node.variable
        self.before, self.after = hooks
        self.on_grad: Hooks = self.variable._post_accumulate_grad_hooks or {}
        self.is_done = False


class LeafHooks:
    """`LeafHooks` are the hooks of the leaves in `nodes`, for one run of the engine; falsy if there are none.

    `gather(leaf, gradient)` is called for each leaf. `gather` and the hooks run in the context manager `inside()`.
    """

    def __init__(
        self,
        nodes: Iterable[Any],
        gather: Callable[[Tensor, Tensor], None],
        inside: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        found = [(node, node_hooks(node)) for node in nodes]
        self._leaves = {
            node: _Leaf(node, hooks)
            for node, hooks in found
            if hooks[0] or hooks[1] or node.variable._post_accumulate_grad_hooks
        }
        self._gather = gather
        self._inside = inside
        self._number = -1
        self._handles: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def __enter__(self) -> LeafHooks:
        with _register_hook_lock:  # register_hook() in two threads at once could lose a hook
            for leaf in self._leaves.values():
                self._handles.append(leaf.variable.register_hook(self._listen(leaf)))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._handles:
            one.remove()

    def begin(self, first: int) -> tuple[Tensor, GradientEdge]:
        """Return an extra root for the run, and its input's edge; the sequence number `first` makes it run first."""
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        with torch.enable_grad():
            root: Tensor = Begin.apply(anchor)  # type: ignore[no-untyped-call]
        node: Any = root.grad_fn
        node.on_run = self._set_number
        node._set_sequence_nr(first)
        return root, get_gradient_edge(anchor)

    def _set_number(self, number: int) -> None:
        self._number = number

    def _listen(self, leaf: _Leaf) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor) -> None:
            # Another run may reach the same leaf: in another thread, or inside this run (activation checkpointing). A
            # device's thread may reach the leaf before the number is known; `rest` then calls the hooks after the run.
            if not leaf.is_done and _backward_number() == self._number:
                self._run(leaf, gradient)

        return on_gradient

    def _run(self, leaf: _Leaf, gradient: Tensor | None) -> None:
        leaf.is_done = True
        with self._inside():
            values: tuple[Tensor | None, ...] = (gradient,)
            for hook in list(leaf.before.values()):
                values = _check(hook, hook(values), values)
            value = values[0]
            if value is not None and leaf.on_grad:
                value = _call_on_grad(leaf, value)
            if value is not None:
                self._gather(leaf.variable, value)
            for hook in list(leaf.after.values()):
                _check(hook, hook((), values), ())

    def rest(self, nodes: Sequence[Any], found: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Call the hooks that the run did not call; return the leaves without hooks, with gradients to gather."""
        left = []
        for node, gradient in zip(nodes, found, strict=False):
            leaf = self._leaves.get(node)
            if leaf is None:
                if gradient is not None:
                    left.append((node.variable, gradient))
            elif not leaf.is_done and gradient is not None:
                self._run(leaf, gradient)
        return left


def _call_on_grad(leaf: _Leaf, gradient: Tensor) -> Tensor | None:
    """Call the hooks that need the gradient in `.grad`; return the gradient that they leave there."""
    variable = leaf.variable
    with grads_are_ours:
        before = variable.grad
        variable.grad = gradient.clone()  # a hook may modify it in place, but other tensors may share the memory
        try:
            for hook in list(leaf.on_grad.values()):
                hook(variable)
            return variable.grad
        finally:
            variable.grad = before


def _check(hook: Callable[..., Any], result: Any, before: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the values after `hook` has returned `result` for `before`; refuse the results that PyTorch refuses."""
    if result is None:
        return before
    name = getattr(hook, "__name__", type(hook).__name__)
    if not isinstance(result, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(result).__name__}'")
    if len(result) != len(before):
        raise RuntimeError(
            f"hook '{name}' has returned an incorrect number of values (got {len(result)}, but expected {len(before)})"
        )
    for new, old in zip(result, before, strict=True):
        if new is None:
            continue
        if old is None:
            raise RuntimeError("can't replace a None gradient with a non-None value")
        if not isinstance(new, Tensor):
            raise TypeError(f"expected Variable, but hook returned '{type(new).__name__}'")
        if new.type() != old.type():
            raise RuntimeError(f"hook '{name}' has changed the type of value (was {old.type()} got {new.type()})")
        if new.shape != old.shape:
            raise RuntimeError(f"hook '{name}' has changed the size of value")
    return result
