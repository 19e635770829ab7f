"""A `Shard` is one server's part of the parameters; it applies the gradients that trainers push.

A `Shard` makes no calls, uses no lock and never reads the time: the same entries in the same order give bitwise
identical parameters, also on a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx._base.param_groups import MakeOptimizer
from phalanx.errors import MismatchError, PeerLostError, PhalanxError
from phalanx.parameter_server.clipping import Clip, Norms
from phalanx.parameter_server.groups import (
    KINDS,
    Group,
    Options,
    ShardGroups,
    copy_options,
    find_differing,
)
from phalanx.parameter_server.layout import State


class TrainerLostError(PeerLostError):
    """A request cannot be answered because a trainer is lost."""


class NoCopyError(PhalanxError):
    """This server has no copy of the shard."""


@dataclass(frozen=True)
class Spec:
    """A `Spec` describes one ParameterServer; all trainers and servers share it."""

    name: str
    servers: tuple[str, ...]
    trainers: tuple[str, ...]
    synchronous: bool
    max_staleness: int | None
    optimizer: MakeOptimizer
    row_optimizer: MakeOptimizer
    reduction: str
    replicate: bool
    described: str  # the text that all trainers must agree on


@dataclass(frozen=True)
class PushedGradients:
    """`PushedGradients` are one trainer's gradients for one server and step, by name; for tables, with row ids.

    `options` are the trainer's options of all groups; None leaves the options unchanged.
    """

    dense: Mapping[str, Tensor]
    rows: Mapping[str, tuple[Tensor, Tensor]]
    options: Mapping[str, Sequence[Options]] | None = None
    clip: Clip | None = None


class Shard:
    """A `Shard` has parameters and their optimizers, and counts the steps of each trainer.

    `clocks` counts the steps that each trainer has pushed; `step` counts the applied steps (asynchronous: pushes).
    """

    def __init__(self, spec: Spec, state: State, load_number: int = 0) -> None:
        self.spec = spec
        self._groups = {
            kind: ShardGroups(make, _groups_in(state)[kind], state[kind])
            for kind, make in zip(KINDS, (spec.optimizer, spec.row_optimizer), strict=True)
        }
        self._added: list[tuple[str, str]] = []  # the groups added later: their kind and description
        self.left: set[str] = set()
        self.workers: dict[str, int] = {}  # by trainer: the uid of its worker, at creation or when it last attached
        self._total: Tensor | None = None  # the total norm of the next step's gradients, once it is known
        self.load(load_number, state)

    # -- replicated -----------------------------------------------------------------------------------------------

    def apply(self, entry: tuple[Any, ...]) -> None:
        """Apply an entry: a method's name and arguments. Applying an entry again has no effect."""
        what, *arguments = entry
        does: dict[str, Callable[..., None]] = {
            "attach": self.attach,
            "push": self.push,
            "clip": self.clip,
            "leave": self.leave,
            "load": self._load_again,
            "add": self.add,
        }
        does[what](*arguments)

    def attach(self, trainer: str, worker: int) -> None:
        """Record the trainer's worker. The replacement of a lost worker has the same name, but another uid."""
        self.workers[trainer] = worker

    def push(self, trainer: str, clock: int, gradients: PushedGradients) -> None:
        """Store or apply the gradients of a trainer's step number `clock`."""
        if clock < self.clocks[trainer]:
            return  # already applied; the answer was lost with the server that sent it
        self.clocks[trainer] = clock + 1
        if not self.spec.synchronous:
            self._update([gradients])
            self.step += 1
            return
        self._pending.setdefault(clock, {})[trainer] = gradients
        self._advance()

    def clip(self, clock: int, total: Tensor) -> None:
        """Apply the synchronous step `clock`, whose gradients have the norm `total` over all servers."""
        if clock == self.step:
            self._total = total
            self._advance()

    def add(self, number: int, kind: str, group: Group, values: Mapping[str, Tensor], described: str) -> None:
        """Add a group: number `number` of those added after construction."""
        if number == len(self._added):
            self._added.append((kind, described))
            self._groups[kind].add(group, values)

    def leave(self, trainer: str) -> None:
        """Remove a trainer that will not push again, so that the others do not wait for it."""
        self.left.add(trainer)
        self._advance()

    def _load_again(self, number: int, state: State) -> None:
        if number > self.load_number:
            self.load(number, state)

    def load(self, number: int, state: State) -> None:
        """Load these values; all trainers are then at the state's step. Trainers that have left stay removed."""
        self.load_number = number
        self.step: int = state["step"]
        self.clocks: dict[str, int] = {one: self.step for one in self.spec.trainers}
        self._pending: dict[int, dict[str, PushedGradients]] = {}
        self._total = None
        self._is_reduced = False  # whether the parameters hold the gradients of the next step
        self._norms: dict[str, Norms] = {}  # the norms of the last step that was clipped
        with torch.no_grad():
            for kind, groups in self._groups.items():
                groups.load(state[kind], state["optimizer"], state.get("groups", {}).get(kind))

    # -- updates -------------------------------------------------------------------------------------------------------

    def active(self) -> list[str]:
        """Return the trainers that have not left."""
        return [one for one in self.spec.trainers if one not in self.left]

    def behind(self) -> list[str]:
        """Return the trainers whose gradients the next synchronous step still needs."""
        return [one for one in self.active() if self.clocks[one] <= self.step]

    def is_complete(self) -> bool:
        """Return whether all trainers have pushed the next synchronous step; its total norm may still be missing."""
        return bool(self._pending.get(self.step)) and not self.behind()

    def _advance(self) -> None:
        """Apply complete synchronous steps; gradients are added in the order of `trainers`, not of arrival."""
        while self.is_complete():
            pushed = self._next_step()
            if mismatch := self._find_mismatch(pushed):
                del self._pending[self.step]  # a refused step is dropped, like a step whose optimizer raises below
                raise mismatch
            if any(one.clip for one in pushed.values()) and self._total is None:
                return
            del self._pending[self.step]
            self._update(list(pushed.values()))
            self.step += 1

    def _next_step(self) -> dict[str, PushedGradients]:
        pushed = self._pending[self.step]
        return {one: pushed[one] for one in self.spec.trainers if one in pushed}

    def _find_mismatch(self, pushed: Mapping[str, PushedGradients]) -> MismatchError | None:
        """Return the error of a step for which trainers have set different options, before any of it is applied.

        Every server receives all options, so all servers refuse the step.
        """
        with_options = {trainer: one for trainer, one in pushed.items() if one.options is not None}
        for trainer, one in list(with_options.items())[1:]:
            first, other = next(iter(with_options.items()))
            if difference := _find_difference(other, one):
                where, theirs, mine = difference
                return MismatchError(
                    f"ParameterServer {self.spec.name!r}, synchronous step {self.step}: {where} is {theirs} on trainer "
                    f"{first!r} and {mine} on {trainer!r}. Nothing of the step was applied.\nLet the same schedulers "
                    "make the same steps on all trainers, and clip on all or none; resume from a checkpoint."
                )
        return None

    def _reduce(self, pushed: Sequence[PushedGradients]) -> None:
        """Set the parameters' gradients to the sum or mean over trainers. A missing gradient counts as zeros.

        The pushed gradients are left unchanged, even if an optimizer modifies its own: the replica gets them later.
        """
        if self._is_reduced:
            return
        self._is_reduced = True
        divisor = len(pushed) if self.spec.reduction == "mean" else 1
        for name, parameter in self._groups["dense"].parameters.items():
            parts = [one.dense[name] for one in pushed if name in one.dense]
            if parts:
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                parameter.grad = total / divisor if divisor > 1 else total
        for name, table in self._groups["tables"].parameters.items():
            rows = [one.rows[name] for one in pushed if name in one.rows]
            if rows:
                ids = torch.cat([one[0] for one in rows])
                values = torch.cat([one[1] for one in rows])
                grad = torch.sparse_coo_tensor(
                    ids[None], values, table.shape, device=values.device, check_invariants=False
                ).coalesce()
                table.grad = grad / divisor if divisor > 1 else grad

    def norms(self) -> dict[str, Norms]:
        """Return this server's gradient norms for the step that awaits clipping, else for the last clipped step."""
        if self.is_complete():
            pushed = list(self._next_step().values())
            clip = next((one.clip for one in pushed if one.clip), None)
            if clip is not None:
                self._reduce(pushed)
                self._norms = {
                    kind: {name: clip.norm_of(p.grad) for name, p in groups.parameters.items() if p.grad is not None}
                    for kind, groups in self._groups.items()
                }
        return self._norms

    def _update(self, pushed: list[PushedGradients]) -> None:
        """Step the optimizers once, with the options that the trainers have set."""
        options = next((one.options for one in pushed if one.options is not None), {})
        clip = next((one.clip for one in pushed if one.clip), None)
        self._reduce(pushed)
        if clip is not None and self._total is not None:
            parameters = [p for groups in self._groups.values() for p in groups.parameters.values()]
            clip.scale([p.grad for p in parameters if p.grad is not None], self._total)
        self._total, self._is_reduced = None, False
        for kind, groups in self._groups.items():
            groups.set_options(options.get(kind, ()))
            if groups.optimizer is not None:
                groups.optimizer.step()
                groups.optimizer.zero_grad(set_to_none=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def staleness(self, clock: int, lost: Iterable[str] = ()) -> int:
        """Return how many steps a trainer that has pushed `clock` steps is ahead of the slowest remaining trainer."""
        gone = set(lost)
        return max((clock - self.clocks[one] for one in self.active() if one not in gone), default=0)

    def values(self, dense: Iterable[str], rows: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of values, which later updates do not change."""
        parameters, tables = (self._groups[kind].parameters for kind in KINDS)
        whole = {name: parameters[name].detach().clone() for name in dense}
        return whole, {name: tables[name].detach().index_select(0, ids) for name, ids in rows.items()}

    def added(self) -> list[tuple[str, str]]:
        """Return the groups added after construction: their kinds and descriptions."""
        return self._added

    def options(self) -> dict[str, list[Options]]:
        """Return the options of all groups, as a trainer last sent them."""
        return {kind: [copy_options(one) for one in groups.options] for kind, groups in self._groups.items()}

    def state(self, options: Mapping[str, Sequence[Options]] | None = None) -> State:
        """Return a state for `load`. It excludes gradients pushed for an incomplete step.

        `options` come from the calling trainer, which may have changed them since its last push.
        """
        state: State = {"step": self.step, "optimizer": {}, "groups": {}}
        for kind, groups in self._groups.items():
            state[kind] = {name: one.detach().clone() for name, one in groups.parameters.items()}
            state["optimizer"] |= groups.optimizer_state()
            state["groups"][kind] = groups.groups(None if options is None else options.get(kind))
        return state

    def snapshot(self) -> tuple[Any, ...]:
        """Return everything needed to create an identical shard on another server."""
        pending = {step: dict(pushed) for step, pushed in self._pending.items()}
        more = self.options(), list(self._added), dict(self._norms), dict(self.workers)
        return self.spec, self.state(), self.load_number, dict(self.clocks), set(self.left), pending, more

    @classmethod
    def from_snapshot(cls, snapshot: tuple[Any, ...]) -> Shard:
        spec, state, load_number, clocks, left, pending, (options, added, norms, workers) = snapshot
        shard = cls(spec, state, load_number)
        shard.clocks, shard.left, shard._pending = clocks, left, pending
        for kind, groups in shard._groups.items():
            groups.options = options[kind]
        shard._added, shard._norms, shard.workers = added, norms, workers
        return shard


def _groups_in(state: State) -> Mapping[str, Sequence[Group]]:
    """Return the groups of a state; one group of all parameters if the state has no groups."""
    return state.get("groups") or {kind: [{"params": list(state[kind])}] if state[kind] else [] for kind in KINDS}


def _find_difference(one: PushedGradients, other: PushedGradients) -> tuple[str, object, object] | None:
    """Return the first difference between two trainers' options for a step, in words, and both values."""
    if one.clip != other.clip:
        return "the limit to which gradients are clipped", one.clip, other.clip
    for kind in KINDS:
        mine, theirs = ((each.options or {}).get(kind, ()) for each in (one, other))
        if len(mine) != len(theirs):
            return f"the number of groups of {kind}", len(mine), len(theirs)
        for number, (options, others) in enumerate(zip(mine, theirs, strict=True)):
            for key in find_differing(options, others):
                where = f"{key!r} of group {number} of {kind}"
                return where, options.get(key, "not set"), others.get(key, "not set")
    return None
