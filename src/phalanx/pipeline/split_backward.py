"""Run a backward in two parts: first the gradients of the inputs, for which another stage waits, then the weights'.

torch.distributed.pipelining can cut the autograd graph in two. This module adds the missing case: parameters with a
path to the output that does not depend on an input, such as a bias of the whole model. They get their gradients
together with the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from phalanx._base.torch_names import find
from phalanx._comm.backend.imported_environment import environment_preserved


@functools.cache  # called in each backward
def _of_torch(path: str) -> Any:
    return find(path, loses="phalanx.Pipeline has no schedule with split backwards")


@dataclass
class WeightsBackward:
    """`WeightsBackward` is the second part of a backward, ready to run."""

    parameters: Sequence[nn.Parameter]
    groups: list[dict[str, Any]]
    whole: tuple[list[Tensor], list[Tensor | None]] | None = None

    def run(self) -> None:
        """Add the parameters' gradients."""
        if self.whole is not None:
            torch.autograd.backward(*self.whole)
        elif self.groups:
            stage_backward_weight = _of_torch("torch.distributed.pipelining._backward.stage_backward_weight")
            kept = [g for group in self.groups for some in group["grads"] for g in some]
            before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            stage_backward_weight(iter(self.parameters), self.groups, retain_graph=True)
            found = [parameter.grad for parameter in self.parameters]
            _accumulate(self.parameters, before, found, kept)


def backward_input(
    roots: list[Tensor], grads: list[Tensor | None], leaves: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> WeightsBackward:
    """Compute the gradients of the leaves, and return the remaining work, which computes the parameters' gradients.

    The first stage has no leaves. It leaves all work for later, since no stage waits for it.
    """
    with environment_preserved():
        # Importing them takes a second, as it loads much of torch's compiler: only on use.
        get_grad_fn = _of_torch("torch.distributed.pipelining._backward._get_grad_fn_or_grad_acc")
        construct_reverse_graph = _of_torch("torch.distributed.pipelining._backward.construct_reverse_graph")
        get_param_groups = _of_torch("torch.distributed.pipelining._backward.get_param_groups")

    def nodes_of(tensors: Sequence[Tensor]) -> list[Node]:
        return [node for t in tensors if (node := get_grad_fn(t)) is not None]

    parameters = [p for p in parameters if p.requires_grad]
    if not roots:
        return WeightsBackward(parameters, [])
    if not leaves:
        return WeightsBackward(parameters, [], whole=(roots, grads))
    graph = construct_reverse_graph(nodes_of(roots))
    accumulators = {get_grad_fn(p): p for p in parameters}
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
    for leaf, grad in zip(leaves, found, strict=False):
        leaf.grad = grad
    _accumulate(now, [p.grad for p in now], found[len(leaves) :], [*found[: len(leaves)], *grads])
    for group in groups:  # an intermediate without a gradient passes none on
        reached = [at for at, grad in enumerate(group["grads"]) if grad is not None]
        group["intermediates"] = [group["intermediates"][at] for at in reached]
        group["grads"] = [group["grads"][at] for at in reached]
    return WeightsBackward(parameters, [group for group in groups if group["grads"]])


def _accumulate(
    parameters: Sequence[nn.Parameter],
    before: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
) -> None:
    """Add `found` to the gradients `before`, each in separate memory and in its parameter's layout.

    Autograd may return one tensor as the gradient of two parameters (if the model adds them up), or a tensor of
    `others`, which another stage reads. A later addition to one gradient must not change the other.
    """
    addresses = {_address_of(tensor) for tensor in others if tensor is not None}
    for parameter, was, grad in zip(parameters, before, found, strict=True):
        if was is None and grad is not None:
            if grad.is_sparse:
                grad = grad.clone() if _address_of(grad) in addresses else grad
            elif _address_of(grad) in addresses or grad.stride() != parameter.stride():
                grad = torch.empty_like(parameter).copy_(grad)
            addresses.add(_address_of(grad))
        parameter.grad = add_gradients(was, grad)


def _keep(grads: list[Any], at: int) -> Any:
    def hook(grad_outputs: Any) -> None:
        grads[at] = grad_outputs

    return hook


def add_gradients(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum in the memory of one operand; None counts as zero. The sum is dense if either of them is."""
    if total is None or grad is None:
        return grad if total is None else total
    return grad.add_(total) if total.is_sparse and not grad.is_sparse else total.add_(grad)


def _address_of(grad: Tensor) -> int:
    """Return the address of a gradient's values."""
    return (grad._values() if grad.is_sparse else grad).data_ptr()
