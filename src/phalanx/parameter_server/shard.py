"""A server's part of the parameters: what one step of the trainers makes of it.

No call, no lock, no clock here: the same requests in the same order make the same bits. That keeps a replica equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.parameter_server.layout import State

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Spec:
    """What all trainers and servers know of one ParameterServer."""

    name: str
    servers: tuple[str, ...]
    trainers: tuple[str, ...]
    synchronous: bool
    max_staleness: int | None
    optimizer: MakeOptimizer
    row_optimizer: MakeOptimizer
    reduction: str
    replicate: bool
    described: str  # what all trainers must agree on, in words


@dataclass(frozen=True)
class Gradients:
    """What one trainer pushes to one server in one step: by name; of tables, the rows here and a gradient for each."""

    dense: Mapping[str, Tensor]
    rows: Mapping[str, tuple[Tensor, Tensor]]


class Shard:
    """The parameters, their optimizers, and how far each trainer is.

    `clocks`: how many steps each trainer has pushed. `step`: how many are applied; asynchronously, how many pushes.
    """

    def __init__(self, spec: Spec, state: State, load_number: int = 0) -> None:
        self.spec = spec
        self._dense = {name: torch.nn.Parameter(value.clone()) for name, value in state["dense"].items()}
        self._tables = {name: torch.nn.Parameter(value.clone()) for name, value in state["tables"].items()}
        self._optimizer = spec.optimizer(list(self._dense.values())) if self._dense else None
        self._row_optimizer = spec.row_optimizer(list(self._tables.values())) if self._tables else None
        self.left: set[str] = set()
        self.load(load_number, state)

    # -- what is replicated --------------------------------------------------------------------------------------------

    def apply(self, entry: tuple[Any, ...]) -> None:
        """Do what was asked: ("push", ...), ("leave", ...) or ("load", ...). A second time it changes nothing."""
        what, *arguments = entry
        does: dict[str, Callable[..., None]] = {"push": self.push, "leave": self.leave, "load": self._load_again}
        does[what](*arguments)

    def push(self, trainer: str, clock: int, gradients: Gradients) -> None:
        """Take the gradients of a trainer's step number `clock`."""
        if clock < self.clocks[trainer]:
            return  # it was taken; the answer was lost with the server that was to give it
        self.clocks[trainer] = clock + 1
        if not self.spec.synchronous:
            self._update([gradients])
            self.step += 1
            return
        self._pending.setdefault(clock, {})[trainer] = gradients
        self._advance()

    def leave(self, trainer: str) -> None:
        """A trainer pushes no more; the others do not wait for it."""
        self.left.add(trainer)
        self._advance()

    def _load_again(self, number: int, state: State) -> None:
        if number > self.load_number:
            self.load(number, state)

    def load(self, number: int, state: State) -> None:
        """Take these values; all trainers are at the state's step. Who had left is not waited for again."""
        self.load_number = number
        self.step: int = state["step"]
        self.clocks: dict[str, int] = {one: self.step for one in self.spec.trainers}
        self._pending: dict[int, dict[str, Gradients]] = {}
        with torch.no_grad():
            for optimizer, parameters, values in self._groups(state):
                for name, parameter in parameters.items():
                    parameter.copy_(values[name])
                    optimizer.state.pop(parameter, None)
                    if name in state["optimizer"]:
                        optimizer.state[parameter] = _copy(state["optimizer"][name])

    # -- updates -------------------------------------------------------------------------------------------------------

    def active(self) -> list[str]:
        """The trainers that have not left."""
        return [one for one in self.spec.trainers if one not in self.left]

    def behind(self) -> list[str]:
        """Whose gradients the next synchronous step waits for."""
        return [one for one in self.active() if self.clocks[one] <= self.step]

    def _advance(self) -> None:
        """Apply synchronous steps that are complete: always in the trainers' order, whoever was first."""
        while self._pending.get(self.step) and not self.behind():
            pushed = self._pending.pop(self.step)
            self._update([pushed[one] for one in self.spec.trainers if one in pushed])
            self.step += 1

    def _update(self, pushed: list[Gradients]) -> None:
        """One step of the optimizers with the sum or the mean. A trainer without a gradient counts as one of zeros.

        What was pushed is left as it is, whatever the optimizers do to their gradients: it goes to the replica after.
        """
        divisor = len(pushed) if self.spec.reduction == "mean" else 1
        for name, parameter in self._dense.items():
            parts = [one.dense[name] for one in pushed if name in one.dense]
            if parts:
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                parameter.grad = total / divisor if divisor > 1 else total
        for name, table in self._tables.items():
            rows = [one.rows[name] for one in pushed if name in one.rows]
            if rows:
                ids = torch.cat([one[0] for one in rows])
                values = torch.cat([one[1] for one in rows])
                grad = torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False).coalesce()
                table.grad = grad / divisor if divisor > 1 else grad
        for optimizer in (self._optimizer, self._row_optimizer):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def staleness(self, clock: int, lost: Iterable[str] = ()) -> int:
        """How many steps a trainer that has pushed `clock` is ahead of the slowest that is still there."""
        gone = set(lost)
        return max((clock - self.clocks[one] for one in self.active() if one not in gone), default=0)

    def values(self, dense: Iterable[str], rows: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies, which later updates do not change."""
        whole = {name: self._dense[name].detach().clone() for name in dense}
        return whole, {name: self._tables[name].detach().index_select(0, ids) for name, ids in rows.items()}

    def state(self) -> State:
        """What `load` takes; a copy. What trainers have pushed for a step that is not complete is not in it."""
        kept: dict[str, Any] = {}
        state: State = {"step": self.step, "dense": {}, "tables": {}, "optimizer": kept}
        for optimizer, parameters, values in self._groups(state):
            for name, parameter in parameters.items():
                values[name] = parameter.detach().clone()
                if optimizer.state.get(parameter):
                    kept[name] = _copy(optimizer.state[parameter])
        return state

    def _groups(
        self, state: State
    ) -> list[tuple[torch.optim.Optimizer, dict[str, torch.nn.Parameter], dict[str, Tensor]]]:
        pairs = [(self._optimizer, self._dense, "dense"), (self._row_optimizer, self._tables, "tables")]
        return [(optimizer, parameters, state[key]) for optimizer, parameters, key in pairs if optimizer is not None]

    def snapshot(self) -> tuple[Any, ...]:
        """All that makes an equal shard elsewhere."""
        pending = {step: dict(pushed) for step, pushed in self._pending.items()}
        return self.spec, self.state(), self.load_number, dict(self.clocks), set(self.left), pending

    @classmethod
    def from_snapshot(cls, snapshot: tuple[Any, ...]) -> Shard:
        """The opposite of `snapshot`."""
        spec, state, load_number, clocks, left, pending = snapshot
        shard = cls(spec, state, load_number)
        shard.clocks, shard.left, shard._pending = clocks, left, pending
        return shard


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one.clone() if isinstance(one, Tensor) else one for key, one in values.items()}
