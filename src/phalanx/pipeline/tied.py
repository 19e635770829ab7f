"""Keep tied parameters equal on the ranks that use them, for example an embedding that is also the output layer.

Each of these ranks has a copy. In every step, the gradients of all copies are added in rank order, so that each rank
makes the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx._base.partition.parts import LayerRange
from phalanx.pipeline.wire import Wire

_ABSENT, _DENSE, _SPARSE = range(3)


@dataclass(frozen=True)
class Tie:
    """A `Tie` is a tied parameter (its first name in the whole model) and the ranks that have it.

    The first of these ranks sums the gradients.
    """

    name: str
    ranks: tuple[int, ...]


def find_ties(root: nn.Module, parts: Sequence[LayerRange], rank_of: Sequence[int]) -> list[Tie]:
    """Return the parameters that stages on several ranks use, in the order of the whole model."""
    users: dict[int, set[int]] = {}
    for part in parts:
        for parameter in parameters_of(root, part):
            users.setdefault(id(parameter), set()).add(rank_of[part.index])
    return [
        Tie(name, tuple(sorted(users[id(parameter)])))
        for name, parameter in root.named_parameters()
        if len(users.get(id(parameter), ())) > 1
    ]


def parameters_of(root: nn.Module, part: LayerRange) -> list[nn.Parameter]:
    """Return the parameters that a part uses, each once."""
    found = [p for name in part.modules for p in root.get_submodule(name).parameters()]
    for name in part.tensors:
        path, _, last = name.rpartition(".")
        parameter = root.get_submodule(path)._parameters.get(last)
        if parameter is not None:
            found.append(parameter)
    return list({id(p): p for p in found}.values())


class TiedGradients:
    """`TiedGradients` sums the gradients of tied parameters over their ranks. All ranks make the same calls."""

    def __init__(self, ties: Sequence[Tie], own: dict[str, nn.Parameter], wire: Wire, rank: int) -> None:
        self._ties = [(tie, own[tie.name]) for tie in ties if rank in tie.ranks]
        self._wire = wire
        self._rank = rank
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, summed already. Call it before a step's first backward."""
        self._before = [parameter.grad for _, parameter in self._ties]
        for _, parameter in self._ties:
            parameter.grad = None

    def add(self) -> None:
        """Sum the gradients. Call it after a step's last backward."""
        for (tie, parameter), before in zip(self._ties, self._before, strict=True):
            parameter.grad = add_gradients(before, self._sum(tie, parameter))

    def counted_here(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of `parameters` that no lower rank has, so that each counts once in a norm."""
        others = {id(parameter) for tie, parameter in self._ties if tie.ranks[0] != self._rank}
        return [parameter for parameter in parameters if id(parameter) not in others]

    def share_values(self) -> None:
        """Copy the first rank's values of each parameter to the other ranks that have it."""
        with torch.no_grad():
            for tie, parameter in self._ties:
                first, *others = tie.ranks
                if self._rank == first:
                    for rank in others:
                        self._wire.send_tensor(parameter, rank)
                else:
                    parameter.copy_(self._wire.receive_tensor(torch.empty_like(parameter), first))
        self._wire.wait_sent()

    def _sum(self, tie: Tie, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of the gradients of all ranks; None if no rank has one."""
        first, *others = tie.ranks
        total = parameter.grad
        if self._rank == first:
            for rank in others:
                total = add_gradients(total, self._receive(parameter, rank))
            for rank in others:
                self._send(total, rank)
        else:
            self._send(total, first)
            total = self._receive(parameter, first)
        self._wire.wait_sent()
        return total

    def _send(self, grad: Tensor | None, rank: int) -> None:
        """Send a header before the gradient, because the receiver cannot know whether it exists or is sparse."""
        parts: list[Tensor] = []
        header = [_ABSENT, 0, 0]
        if grad is not None and grad.is_sparse:
            grad = grad.coalesce()
            parts = [grad.indices(), grad.values()]
            header = [_SPARSE, *parts[0].shape]
        elif grad is not None:
            parts = [grad]
            header[0] = _DENSE
        for part in (torch.tensor(header, device="cpu"), *parts):
            if part.numel():
                self._wire.send_tensor(part, rank)

    def _receive(self, parameter: nn.Parameter, rank: int) -> Tensor | None:
        kind, num_dims, num_entries = self._wire.receive_tensor(
            torch.empty(3, dtype=torch.int64, device="cpu"), rank
        ).tolist()
        if kind == _ABSENT:
            return None
        dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
        if kind == _DENSE:
            grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            return self._wire.receive_tensor(grad, rank) if grad.numel() else grad
        device = parameter.device
        indices = torch.empty(num_dims, num_entries, dtype=torch.int64, device=device)
        values = torch.empty(num_entries, *parameter.shape[num_dims:], dtype=dtype, device=device)
        for part in (indices, values):
            if part.numel():
                self._wire.receive_tensor(part, rank)
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, device=device, is_coalesced=True, check_invariants=False
        )


def add_gradients(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add one operand to the other in place and return it; None counts as zero. The sum is dense if either is."""
    if total is None or grad is None:
        return grad if total is None else total
    return grad.add_(total) if total.is_sparse and not grad.is_sparse else total.add_(grad)
