"""Run every replica on its part of the batch, each in a thread, forward and backward.

              arguments    w   b                          joined outputs
                  |        |   |     one node of              ^
forward           |  detached  |     autograd's graph         | detached
                  v        v   v                              |
replica 0, 1, ..  leaves of its own --> a graph of its own --> outputs

backward    the node hands each replica its outputs' gradients, all graphs run side by side, and what has arrived at the
            leaves is added up in the order of replicas.

One graph over all replicas would run in one thread: on the CPU autograd runs in the thread that calls backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.nn.data_parallel.containers import map_tensors, tensors_in
from phalanx.nn.data_parallel.replicate import trained_tensors
from phalanx.nn.data_parallel.threads import run_in_threads
from phalanx.torch_names import find

_keeps_graph: Any = find(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    loses="a backward through phalanx.nn.DataParallel keeps its graph",
    instead=lambda: True,
)
# If the count is not known, a storage is taken for shared, and copied.
_storage_use_count: Any = find(
    "torch._C._storage_Use_Count", loses="phalanx.nn.DataParallel copies gradients", instead=lambda storage: 3
)


def parallel_apply(
    module: nn.Module, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
) -> list[Any]:
    """Return the output of each of `replicas` of `module` on its arguments, with gradients for both.

    Raises:
        Exception: what a replica raised, in its class, with the replica's number.
    """
    if not torch.is_grad_enabled():
        return _call(replicas, inputs, kwargs)
    sources = trained_tensors(module)
    leaves = [trained_tensors(replica) for replica in replicas]
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in replicas]  # tensors of the arguments, and their leaves

    def cut(number: int, value: Any) -> Any:
        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            own[number].append((tensor, tensor.detach().requires_grad_()))
            return own[number][-1][1].clone()  # a leaf itself could not be changed in place

        return map_tensors(leaf, value)

    outputs = _call(
        replicas,
        [cut(number, value) for number, value in enumerate(inputs)],
        [cut(number, value) for number, value in enumerate(kwargs)],
    )
    graphs = [
        _Graph(leaves[number], [leaf for _, leaf in own[number]], [t for t in tensors_in(output) if t.requires_grad])
        for number, output in enumerate(outputs)
    ]
    arguments = [source for pairs in own for source, _ in pairs]
    if not any(graph.outputs for graph in graphs):
        return outputs
    joined = iter(_Join.apply(graphs, len(sources), *sources, *arguments))  # type: ignore[no-untyped-call]
    return [map_tensors(lambda t: next(joined) if t.requires_grad else t, output) for output in outputs]


def _call(replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
    calls = [functools.partial(r, *args, **named) for r, args, named in zip(replicas, inputs, kwargs, strict=True)]
    return run_in_threads(calls, "replica")


class _Graph:
    """A graph is one replica's part of a step: from its leaves to its outputs."""

    def __init__(self, leaves: list[Tensor], arguments: list[Tensor], outputs: list[Tensor]) -> None:
        self._leaves = leaves
        self._arguments = arguments
        self.outputs = outputs

    def backward(self, slopes: Sequence[Tensor | None], keep: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the trained tensors and of the arguments, given those of the outputs."""
        reached = [(output, slope) for output, slope in zip(self.outputs, slopes, strict=True) if slope is not None]
        if reached:
            torch.autograd.backward([o for o, _ in reached], [s for _, s in reached], retain_graph=keep)
        return [_take_gradient(leaf) for leaf in self._leaves], [_take_gradient(leaf) for leaf in self._arguments]


class _Join(torch.autograd.Function):
    """It is the node that stands for all replicas' graphs.

    Numerics: a parameter's gradient is the sum of the replicas', in their order.
    """

    @staticmethod
    def forward(ctx: Any, graphs: list[_Graph], num_sources: int, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all graphs, cut off from them."""
        ctx.graphs, ctx.num_sources = graphs, num_sources
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for graph in graphs for output in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run all graphs backward, side by side.

        Raises:
            RuntimeError: it was called with create_graph=True.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "DataParallel: backward(create_graph=True) is refused, because the replicas' graphs have been cut off "
                "from the one that would be differentiated again. For this step call `model.module` in place of `model`"
            )
        keep = _keeps_graph()
        waiting = iter(slopes)
        calls = [
            functools.partial(graph.backward, [next(waiting) for _ in graph.outputs], keep) for graph in ctx.graphs
        ]
        found = run_in_threads(calls, "backward of replica")
        trained = [_add([part[index] for part, _ in found]) for index in range(ctx.num_sources)]
        return None, None, *trained, *(gradient for _, arguments in found for gradient in arguments)


def _take_gradient(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _add(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if any(gradient.is_sparse for gradient in present):
        return functools.reduce(torch.add, present)
    # In place where the memory is a replica's own. It may be that of another gradient, too: of `h + a.unsqueeze(0) +
    # b.unsqueeze(0)` with one sample on the replica, both are views of what flows on to `h`.
    first = present[0].clone() if len(present) > 1 and _is_shared(present[0]) else present[0]
    return functools.reduce(Tensor.add_, present[1:], first)


def _is_shared(tensor: Tensor) -> bool:
    """Return whether the storage has another holder than `tensor` and the object that asks for it."""
    return bool(_storage_use_count(tensor.untyped_storage()._cdata) > 2)
