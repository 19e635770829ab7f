"""Join the workers' local autograd graphs where tensors were sent to another worker, and where they were received.

    caller                                        callee
    x ─► SendRpc ┄┄┄┄┄┄┄┄┄ message ┄┄┄┄┄┄┄┄┄► RecvRpc ─► f
                                                          │
    y ◄─ RecvRpc ◄┄┄┄┄┄┄┄┄ message ┄┄┄┄┄┄┄┄┄ SendRpc ◄────┘

A message is a call's arguments, or its result, with tensors that require grad. With each of these tensors it carries
the tensor's ancestors: all messages, and which of their tensors, from which it was computed. So the worker that calls
backward knows all workers of the pass, and no gradient is sent where one process would have none: a tensor that was
sent but not used is not in the graph, its hooks are not called, and no worker waits for its gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx._base.torch_names import find
from phalanx.errors import PhalanxError
from phalanx.rpc.autograd.leaf_hooks import LeafHooks, grads_are_ours, keeps_grad

_engine: Any = find(
    "torch.autograd.Variable._execution_engine", loses="distributed backwards of phalanx.rpc do not work"
)

# The depth: the length of the longest chain of messages that ends with this message; the uid of its sender; its serial
# number there. In backward, deeper messages come first: all workers wait in this order, so no two wait for each other.
MessageId = tuple[int, int, int]
Ancestors = Mapping[MessageId, int]  # the tensors of each message: bit n for tensor n, or ALL
ALL = -1

# sequence numbers: of the nodes that are ready, the engine runs the one with the highest sequence number first
_FIRST, _LAST = 1 << 62, 0


class BackwardPass(Protocol):
    """A `BackwardPass` is the interface of a pass that the nodes of its graph use."""

    context_id: int

    def wait(self, message: MessageId) -> None:
        """Wait until the gradients of a message's tensors are received."""

    def pop_gradient(self, message: MessageId, number: int) -> Tensor | None:
        """Remove and return the gradient of one tensor of the message; None if the tensor has no gradient."""

    def send(self, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message's tensors to its sender."""

    def gather(self, variable: Tensor, gradient: Tensor) -> None:
        """Add a leaf's gradient to the context while the engine runs."""

    def inside(self) -> AbstractContextManager[Any]:
        """Return a context manager that puts this thread in the pass's context."""


class _Current(threading.local):
    """`_Current` is the pass that this thread runs."""

    run: BackwardPass | None = None


current = _Current()


class SendRpc(torch.autograd.Function):
    """A `SendRpc` is the node of a sent tensor. Its output is a stub; its backward returns the received gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return a stub of the tensor."""
        ctx.set_materialize_grads(False)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the received gradient."""
        return _current_pass().pop_gradient(ctx.message, ctx.number)


class RecvRpc(torch.autograd.Function):
    """A `RecvRpc` is the node of a message's received tensors. Its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        """Return the tensors themselves, as in-place operations do; the anchor makes the engine run this node."""
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = _current_pass()
        check_context(ctx, run.context_id)
        run.send(ctx.message, gradients)
        return (None,) * (len(gradients) + 1)


class Gate(torch.autograd.Function):
    """A `Gate` delays the SendRpcs of one message until their gradients are received; then the next gate runs.

     gate ─► gate ─► gate          each waits with the lowest priority: when no other node is ready
       │       │       │
    SendRpc SendRpc SendRpc        deepest message first
    """

    @staticmethod
    def forward(ctx: Any, *after: Tensor) -> Tensor:
        """Return one output for the stubs of one message and the output of the next gate."""
        ctx.count = len(after)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Wait until the message's gradients are received."""
        _current_pass().wait(ctx.message)
        return (gradient,) * ctx.count


def check_context(node: Any, context_id: int) -> None:
    """Check that a RecvRpc belongs to the context whose gradients are computed."""
    if node.context_id != context_id:
        raise PhalanxError(
            f"backward of context {context_id} has reached a tensor that arrived in context {node.context_id}: a graph "
            "ends with its context. Call detach() on tensors that you use in the next one."
        )


def _current_pass() -> BackwardPass:
    if current.run is None:
        raise PhalanxError(
            "backward() has reached a tensor that arrived from another worker: gradients cross workers with "
            "phalanx.rpc.autograd.backward(context_id, roots) only."
        )
    return current.run


# An input of every RecvRpc, so that the engine runs the node.
_anchor = torch.zeros((), requires_grad=True, device="cpu")
_anchor_edge = get_gradient_edge(_anchor)
_LEAF: type = type(_anchor_edge.node)
_RECV: type = RecvRpc._backward_cls
_HOOKED = "_phalanx_hooked"


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that registers a node's hook as `register` does, and marks the node."""

    def register_and_note(node: Any, hook: Callable[..., Any]) -> Any:
        handle = register(node, hook)
        setattr(node, _HOOKED, True)
        return handle

    return register_and_note


for _name in ("register_hook", "register_prehook"):
    setattr(_RECV, _name, _noting(getattr(_RECV, _name)))


@dataclass(frozen=True)
class GraphEnds:
    """`GraphEnds` are the ends of a local graph: its leaves, and the tensors received from other workers."""

    leaves: list[Any]
    received: dict[Any, int]  # by RecvRpc node: which of its message's tensors, bit n for tensor n

    def has_hooks(self) -> bool:
        """Return whether hooks require that the engine runs the nodes at these ends, as `run_engine` does.

        Hooks of leaves may need gradients in `.grad` until the pass ends. Hooks of received tensors' nodes are called
        only if the nodes run.
        """
        return any(hasattr(node, _HOOKED) for node in self.received) or any(
            keeps_grad(node.variable) for node in self.leaves
        )

    def ancestors(self, context_id: int) -> Ancestors:
        """Return all messages of the context from which the outputs were computed."""
        found: dict[MessageId, int] = {}
        for node, mask in self.received.items():
            if node.context_id != context_id:
                continue
            is_all = mask == (1 << node.count) - 1
            found[node.message] = found.get(node.message, 0) | (ALL if is_all else mask)
            rows = node.ancestors
            for row in rows if len(rows) == 1 else [row for n, row in enumerate(rows) if mask >> n & 1]:
                for message, its_mask in row.items():
                    found[message] = found.get(message, 0) | its_mask
        return found


@dataclass(frozen=True)
class SentMessage:
    """A `SentMessage` is a message that this worker sent, or some of its tensors. `stubs` keep the graph alive."""

    message: MessageId
    to: int  # the uid of its receiver
    stubs: Sequence[Tensor]
    reached: GraphEnds

    def part(self, mask: int) -> SentMessage:
        """Return the message reduced to the tensors in `mask`."""
        stubs = [stub for number, stub in enumerate(self.stubs) if mask >> number & 1]
        if len(stubs) == len(self.stubs):
            return self
        return SentMessage(self.message, self.to, stubs, reach((stub.grad_fn, 0) for stub in stubs))


def reach(edges: Iterable[tuple[Any, int]]) -> GraphEnds:
    """Return the ends of the graph behind these outputs of nodes. Cost: one visit of each node."""
    leaves: list[Any] = []
    received: dict[Any, int] = {}
    seen: set[Any] = set()
    stack = [edges]
    while stack:
        for node, number in stack.pop():
            if node is None:
                continue
            kind = type(node)
            if kind is _RECV:
                received[node] = received.get(node, 0) | 1 << number
            elif node not in seen:
                seen.add(node)
                if kind is _LEAF:
                    leaves.append(node)
                    continue
                # the first node that a thread creates has this sequence number, and a gate could run before it
                if node._sequence_nr() == _LAST:
                    node._set_sequence_nr(1)
                stack.append(node.next_functions)
    return GraphEnds(leaves, received)


def _ancestors_of_each(nodes: Sequence[Any], context_id: int) -> list[Ancestors]:
    """Return the ancestors of each of these nodes. Cost: two visits of each node behind them."""
    places: dict[tuple[Any, int], int] = {}  # by received tensor: its bit in the bit masks below
    found: dict[Any, int] = {}
    stack = list(nodes)
    while stack:
        node = stack[-1]
        following = [edge for edge in node.next_functions if edge[0] is not None]
        missing = [one for one, _ in following if type(one) is not _RECV and one not in found]
        if missing and node not in found:
            stack += missing
            continue
        stack.pop()
        bits = 0
        for edge in following:
            bits |= 1 << places.setdefault(edge, len(places)) if type(edge[0]) is _RECV else found[edge[0]]
        found[node] = bits
    rows: dict[int, Ancestors] = {}
    for bits in {found[node] for node in nodes}:
        received: dict[Any, int] = {}
        for (node, number), place in places.items():
            if bits >> place & 1:
                received[node] = received.get(node, 0) | 1 << number
        rows[bits] = GraphEnds([], received).ancestors(context_id)
    return [rows[found[node]] for node in nodes]


def make_send(
    tensors: Sequence[Tensor], context_id: int, to: int, uid: int, number: int
) -> tuple[SentMessage, tuple[Ancestors, ...]] | None:
    """Record that these tensors are sent; return the message and its ancestors, or None if grad mode is off.

    There is one entry of ancestors for each tensor, or a single entry if they are the same for all tensors.
    """
    stubs: list[Tensor] = [SendRpc.apply(one) for one in tensors]  # type: ignore[no-untyped-call]
    nodes: list[Any] = [one.grad_fn for one in stubs]
    if nodes[0] is None:
        return None
    reached = reach((node, 0) for node in nodes)
    if len(nodes) == 1 or not reached.received:
        rows = [reached.ancestors(context_id)]
    else:
        rows = _ancestors_of_each(nodes, context_id)
        if all(row == rows[0] for row in rows):
            del rows[1:]
    depth = max((message[0] for row in rows for message in row), default=0) + 1
    for at, node in enumerate(nodes):
        node.message, node.number = (depth, uid, number), at
    return SentMessage((depth, uid, number), to, stubs, reached), tuple(rows)


def make_recv(tensors: Sequence[Tensor], context_id: int, message: MessageId, ancestors: Sequence[Ancestors]) -> Any:
    """Attach received tensors to the graph; return the node. `ancestors` has the form that `make_send` returns."""
    with torch.enable_grad():
        RecvRpc.apply(_anchor, *tensors)  # type: ignore[no-untyped-call]
    node: Any = tensors[0].grad_fn
    node.context_id = context_id
    node.message = message
    node.count = len(tensors)
    node.ancestors = ancestors
    node._set_sequence_nr(_FIRST)
    return node


def chain_gates(sends: Sequence[SentMessage]) -> Tensor:
    """Return one output whose backward runs the SendRpcs of all these messages, one message after another."""
    after: tuple[Tensor, ...] = ()
    with torch.enable_grad():
        for send in reversed(sends):
            gate: Tensor = Gate.apply(*send.stubs, *after)  # type: ignore[no-untyped-call]
            node: Any = gate.grad_fn
            node.message = send.message
            node._set_sequence_nr(_LAST)
            after = (gate,)
    return after[0]


def run_engine(
    run: BackwardPass,
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    reached: Iterable[GraphEnds],
    retain_graph: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Run autograd from `outputs` in this thread; return the leaves' gradients that `run` has not gathered.

    `.grad` changes only while hooks that need it run. The hooks of AccumulateGrad nodes are called as if these nodes
    ran. If hooks need gradients in `.grad` until the pass ends (DistributedDataParallel reduces them there), the
    gradients stay there until the pass ends; then `.grad` is restored. Only one such run is active at a time.
    """
    leaves: dict[Any, None] = {}
    has_received = False
    for one in reached:
        leaves.update(dict.fromkeys(one.leaves))
        has_received = has_received or bool(one.received)
    variables = [node.variable for node in leaves]
    if any(map(keeps_grad, variables)):
        return _run_through_grad(outputs, gradients, variables, retain_graph)
    others = [_anchor_edge] if has_received and _anchor_edge.node not in leaves else []
    return _run(run, list(outputs), list(gradients), retain_graph, list(leaves), others)[0]


def run_engine_from(
    run: BackwardPass, send: SentMessage, arrived: Sequence[Tensor | None], retain_graph: bool
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[MessageId, Sequence[Tensor | None]]]]:
    """Run the engine from one message alone; return the leaves' gradients, and the gradients to send, by message.

    No gradient of a stub may be None. No SendRpc, RecvRpc or Gate runs; the caller sends the gradients after the run.
    """
    leaves, received = send.reached.leaves, send.reached.received
    outputs: list[Any] = []
    gradients: list[Tensor] = []
    for stub in send.stubs:
        node: Any = stub.grad_fn
        gradient = arrived[node.number]
        assert gradient is not None
        outputs.append(GradientEdge(*node.next_functions[0]))
        gradients.append(gradient)
    others = []
    for one in received:
        check_context(one, run.context_id)
        others += [GradientEdge(one, number) for number in range(one.count)]
    mine, found = _run(run, outputs, gradients, retain_graph, leaves, others)
    at = 0
    outgoing = []
    for one in received:
        outgoing.append((one.message, found[at : at + one.count]))
        at += one.count
    return mine, outgoing


def _run(
    run: BackwardPass,
    outputs: list[Any],
    gradients: list[Tensor],
    retain_graph: bool,
    leaves: list[Any],
    others: list[Any],
) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Tensor | None]]:
    """Run the engine as torch.autograd.grad does, without its checks of the arguments.

    Return the leaves' gradients that are not gathered yet, and the gradients of `others`.
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
            found = _run_backward([*outputs, root], [*gradients, torch.empty(0, device="cpu")], retain_graph, inputs)
    return hooks.rest(leaves, found), found[len(leaves) :]


def _run_backward(
    outputs: list[Any], gradients: list[Tensor], retain_graph: bool, inputs: list[Any]
) -> Sequence[Tensor | None]:
    found: Sequence[Tensor | None] = _engine.run_backward(
        tuple(outputs), tuple(gradients), retain_graph, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=False,
    )  # fmt: skip
    return found


def _run_through_grad(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], variables: Sequence[Tensor], retain_graph: bool
) -> list[tuple[Tensor, Tensor]]:
    with grads_are_ours:
        before = [one.grad for one in variables]
        try:
            for one in variables:
                one.grad = None
            torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)
            # Copy the gradients, because code that reduces them (DDP) may reuse their memory.
            return [(one, one.grad.clone()) for one in variables if one.grad is not None]
        finally:
            for one, gradient in zip(variables, before, strict=True):
                one.grad = gradient
