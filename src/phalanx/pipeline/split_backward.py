"""A backward in two parts: first the gradients of the inputs, which another stage waits for, later those of weights.

torch.distributed.pipelining knows how to cut the graph of autograd in two. This adds what it leaves out: parameters
that reach the output by a way of their own, and not through anything that comes from an input, as a bias of the whole
model does. They get their gradients with the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


@dataclass
class WeightsBackward:
    """The second part, ready to run."""

    parameters: Sequence[nn.Parameter]
    groups: list[dict[str, Any]]
    whole: tuple[list[Tensor], list[Tensor | None]] | None = None

    def run(self) -> None:
        """Add the parameters' gradients."""
        if self.whole is not None:
            torch.autograd.backward(*self.whole)
        elif self.groups:
            from torch.distributed.pipelining._backward import stage_backward_weight

            stage_backward_weight(iter(self.parameters), self.groups)


def backward_input(
    roots: list[Tensor], grads: list[Tensor | None], leaves: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> WeightsBackward:
    """Give every leaf its gradient, and return what gives the parameters theirs.

    A stage without such leaves, the first, leaves all for later: there is nobody who waits.
    """
    from torch.distributed.pipelining._backward import (  # a second, and much of torch's compiler: only who needs it
        _get_grad_fn_or_grad_acc,
        construct_reverse_graph,
        get_param_groups,
    )

    def nodes_of(tensors: Sequence[Tensor]) -> list[Node]:
        return [node for t in tensors if (node := _get_grad_fn_or_grad_acc(t)) is not None]

    parameters = [p for p in parameters if p.requires_grad]
    if not roots:
        return WeightsBackward(parameters, [])
    if not leaves:
        return WeightsBackward(parameters, [], whole=(roots, grads))
    graph = construct_reverse_graph(nodes_of(roots))
    accumulators = {_get_grad_fn_or_grad_acc(p): p for p in parameters}
    groups = get_param_groups(nodes_of(leaves), [a for a in accumulators if a is not None], graph)
    later = {node for group in groups for node in group["params"]}
    now = [p for node, p in accumulators.items() if node in graph and node not in later]
    handles = []
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [None] * len(group["intermediates"])
        for at, node in enumerate(group["intermediates"]):
            handles.append(node.register_prehook(_keep(group["grads"], at)))
    try:
        wanted = [*leaves, *now]
        found = torch.autograd.grad(roots, wanted, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, grad in zip(wanted, found, strict=True):
        if grad is not None:
            tensor.grad = grad if tensor.grad is None else tensor.grad + grad
    for group in groups:  # an intermediate that no gradient came to passes none on
        reached = [at for at, grad in enumerate(group["grads"]) if grad is not None]
        group["intermediates"] = [group["intermediates"][at] for at in reached]
        group["grads"] = [group["grads"][at] for at in reached]
    for root in roots:
        if not root._is_view():
            root.detach_()  # what only the way to the inputs needed is freed
    return WeightsBackward(parameters, [group for group in groups if group["grads"]])


def _keep(grads: list[Any], at: int) -> Any:
    def hook(grad_outputs: Any) -> None:
        grads[at] = grad_outputs

    return hook
