"""The joints between the local graphs of autograd: where tensors left for another worker, and where they arrived.

    caller                                        callee
    x ─► SendRpc ┄┄┄┄┄┄┄┄┄ message ┄┄┄┄┄┄┄┄┄► RecvRpc ─► f
                                                          │
    y ◄─ RecvRpc ◄┄┄┄┄┄┄┄┄ message ┄┄┄┄┄┄┄┄┄ SendRpc ◄────┘

A message is a call's arguments, or its result, with tensors that require grad. Of each its receiver learns the
ancestors: all messages that its tensors were computed from. So whoever begins a backward knows all that take part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd.leaf_hooks import LeafHooks

# How many messages lie before it, at most, in a row; the uid of its sender; its number there.
# Backwards, who lies deeper comes first: all workers wait for gradients in this order, so none for another in turn.
MessageId = tuple[int, int, int]

_FIRST, _LAST = 1 << 62, 0  # sequence numbers: of what is ready, the engine runs the highest first


class Gradients(Protocol):
    """A backward pass, as the joints see it."""

    context_id: int

    def wait(self, message: MessageId) -> None:
        """Wait until the gradients of a message's tensors are here."""

    def take(self, message: MessageId) -> Sequence[Tensor | None]:
        """They."""

    def send(self, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message's tensors to where they came from."""

    def gather(self, variable: Tensor, gradient: Tensor) -> None:
        """Add a leaf's gradient to the context while the engine runs."""

    def inside(self) -> AbstractContextManager[Any]:
        """Return what lets this thread be inside of the context."""


class _Current(threading.local):
    """The pass that this thread runs."""

    run: Gradients | None = None


current = _Current()


class SendRpc(torch.autograd.Function):
    """Tensors leave. Its output stands for all of them; backward, it gives them the gradients that came back."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """One output for all."""
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """The gradients that came back."""
        return tuple(_current_pass().take(ctx.message))


class RecvRpc(torch.autograd.Function):
    """Tensors have arrived, and become its outputs in place. Backward, it sends their gradients to their sender."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        """The tensors themselves; the anchor lets the engine come here."""
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send them."""
        run = _current_pass()
        check_context(ctx, run.context_id)
        run.send(ctx.message, gradients)
        return (None,) * (len(gradients) + 1)


class Gate(torch.autograd.Function):
    """Of one pass: lets a SendRpc go on when its gradients are here, and only then the next gate.

     gate ─► gate ─► gate          each waits, with the lowest priority: when nothing else is left to run
       │       │       │
    SendRpc SendRpc SendRpc        deepest message first
    """

    @staticmethod
    def forward(ctx: Any, *after: Tensor) -> Tensor:
        """One output for a SendRpc's and the next gate's."""
        ctx.count = len(after)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Wait."""
        _current_pass().wait(ctx.message)
        return (gradient,) * ctx.count


def check_context(node: Any, context_id: int) -> None:
    """A RecvRpc's is the one whose gradients are computed."""
    if node.context_id != context_id:
        raise PhalanxError(
            f"backward of context {context_id} has come to a tensor that arrived in context {node.context_id}: a graph "
            "ends with its context. Call detach() on what one hands to the next."
        )


def _current_pass() -> Gradients:
    if current.run is None:
        raise PhalanxError(
            "backward() has come to a tensor that arrived from another worker: gradients cross workers with "
            "phalanx.rpc.autograd.backward(context_id, roots) only."
        )
    return current.run


# What RecvRpc hangs on, so that the engine finds something to run it for.
_anchor = torch.zeros((), requires_grad=True)
_anchor_edge = get_gradient_edge(_anchor)
_through_grad = threading.Lock()
_LEAF: type = type(_anchor_edge.node)
_RECV: type = RecvRpc._backward_cls


@dataclass(frozen=True)
class Reached:
    """Where a local graph ends: the leaves, and the tensors that came from others."""

    leaves: list[Any]
    received: list[Any]

    def has_hooks(self) -> bool:
        """Whether hooks of leaves wait for gradients to be in `.grad`."""
        return any(node.variable._post_accumulate_grad_hooks for node in self.leaves)

    def ancestors(self, context_id: int) -> set[MessageId]:
        """All messages of the context from which it was computed."""
        found: set[MessageId] = set()
        for node in self.received:
            if node.context_id == context_id:
                found |= node.ancestors
        return found


@dataclass(frozen=True)
class Send:
    """A message of this worker's: `output` keeps its graph."""

    message: MessageId
    to: int  # the uid of who has it
    output: Tensor
    reached: Reached


def reach(nodes: Iterable[Any]) -> Reached:
    """What can be reached backwards from these nodes. Cost: looks at each node once."""
    leaves, received = [], []
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is _LEAF:
            leaves.append(node)
        elif kind is _RECV:
            received.append(node)
        else:
            if node._sequence_nr() == _LAST:  # the first node of a thread: no gate may come before it
                node._set_sequence_nr(1)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
    return Reached(leaves, received)


def make_send(
    tensors: Sequence[Tensor], context_id: int, to: int, uid: int, number: int
) -> tuple[Send, set[MessageId]] | None:
    """Note that these tensors leave, and the message's ancestors; None if nothing is being recorded (no_grad)."""
    output: Tensor = SendRpc.apply(*tensors)  # type: ignore[no-untyped-call]
    node: Any = output.grad_fn
    if node is None:
        return None
    reached = reach([node])
    ancestors = reached.ancestors(context_id)
    depth = max((one[0] for one in ancestors), default=0) + 1
    node.message = (depth, uid, number)
    return Send(node.message, to, output, reached), ancestors


def make_recv(tensors: Sequence[Tensor], context_id: int, message: MessageId, ancestors: Iterable[MessageId]) -> Any:
    """Attach tensors that have arrived to the graph; the node."""
    with torch.enable_grad():
        RecvRpc.apply(_anchor, *tensors)  # type: ignore[no-untyped-call]
    node: Any = tensors[0].grad_fn
    node.context_id = context_id
    node.message = message
    node.count = len(tensors)
    node.ancestors = frozenset((*ancestors, message))
    node._set_sequence_nr(_FIRST)
    return node


def chain_gates(sends: Sequence[Send]) -> Tensor:
    """One output that lets all of them run, one after the other."""
    after: tuple[Tensor, ...] = ()
    with torch.enable_grad():
        for send in reversed(sends):
            gate: Tensor = Gate.apply(send.output, *after)  # type: ignore[no-untyped-call]
            node: Any = gate.grad_fn
            node.message = send.message
            node._set_sequence_nr(_LAST)
            after = (gate,)
    return after[0]


def run_engine(
    run: Gradients,
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    reached: Iterable[Reached],
    retain_graph: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Run autograd from `outputs` to where it ends, in this thread; the leaves' gradients that `run` has not gathered.

    No `.grad` is touched, and hooks of the nodes that would add to it are called as if they did. But where hooks wait
    for gradients to be in `.grad` (DistributedDataParallel's do, and combine them there), they find them, and all is
    put back at the end. One such run goes on at a time.
    """
    leaves: dict[Any, None] = {}
    has_received = False
    for one in reached:
        leaves.update(dict.fromkeys(one.leaves))
        has_received = has_received or bool(one.received)
    variables = [node.variable for node in leaves]
    if any(one._post_accumulate_grad_hooks for one in variables):
        return _run_through_grad(outputs, gradients, variables, retain_graph)
    others = [_anchor_edge] if has_received and _anchor_edge.node not in leaves else []
    return _run(run, list(outputs), list(gradients), retain_graph, list(leaves), others)[0]


def run_engine_from(
    run: Gradients, send: Send, arrived: Sequence[Tensor | None], retain_graph: bool
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[MessageId, Sequence[Tensor | None]]]]:
    """As `run_engine`, from one message alone: the leaves' gradients, and those that go on to others, by message.

    They go out when the engine has run, and not while it does; but none of the graph's joints has to be run in Python.
    """
    leaves, received = send.reached.leaves, send.reached.received
    node: Any = send.output.grad_fn
    outputs: list[Any] = []
    gradients: list[Tensor] = []
    for (function, number), gradient in zip(node.next_functions, arrived, strict=True):
        if gradient is not None and function is not None:
            outputs.append(GradientEdge(function, number))
            gradients.append(gradient)
    others = []
    for one in received:
        check_context(one, run.context_id)
        others += [GradientEdge(one, number) for number in range(one.count)]
    mine, found = _run(run, outputs, gradients, retain_graph, leaves, others)
    at = 0
    going = []
    for one in received:
        going.append((one.message, found[at : at + one.count]))
        at += one.count
    return mine, going


def _run(
    run: Gradients,
    outputs: list[Any],
    gradients: list[Tensor],
    retain_graph: bool,
    leaves: list[Any],
    others: list[Any],
) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Tensor | None]]:
    """Run the engine as torch.autograd.grad does, after checks of what a user may give.

    Returns the leaves' gradients that are not gathered yet, and the gradients of `others`.
    """
    if not outputs or not (leaves or others):
        return [], [None] * len(others)
    inputs = [*(GradientEdge(node, 0) for node in leaves), *others]
    hooks = LeafHooks(leaves, run.gather, run.inside)
    if not hooks:
        found = _run_backward(outputs, gradients, retain_graph, inputs)
    else:
        with hooks:
            root, edge = hooks.begin(_FIRST)
            inputs.append(edge)
            found = _run_backward([*outputs, root], [*gradients, torch.empty(0)], retain_graph, inputs)
    return hooks.rest(leaves, found), found[len(leaves) :]


def _run_backward(
    outputs: list[Any], gradients: list[Tensor], retain_graph: bool, inputs: list[Any]
) -> Sequence[Tensor | None]:
    engine: Any = torch.autograd.Variable._execution_engine
    found: Sequence[Tensor | None] = engine.run_backward(
        tuple(outputs), tuple(gradients), retain_graph, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=False,
    )  # fmt: skip
    return found


def _run_through_grad(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], variables: Sequence[Tensor], retain_graph: bool
) -> list[tuple[Tensor, Tensor]]:
    with _through_grad:
        before = [one.grad for one in variables]
        try:
            for one in variables:
                one.grad = None
            torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)
            # Copies: what combines gradients may use their memory again.
            return [(one, one.grad.clone()) for one in variables if one.grad is not None]
        finally:
            for one, gradient in zip(variables, before, strict=True):
                one.grad = gradient
