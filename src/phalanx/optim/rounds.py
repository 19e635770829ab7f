"""Combine replicas that train separately in rounds: every few steps of the optimizer, and at the end.

    rank 0   step step step step | round | step step (no more data) | round |          . . .          | round |
    rank 1   step step step step | round | step step step step      | round | step (no more data)     | round |

A round begins with an all_reduce that tells which ranks have stepped since the last round, and how many have no more
data. Only ranks that have stepped count in the result. A rank without more data joins all rounds until the end, so no
rank hangs, and all end with the same values.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx._comm.backend.shared import require_group
from phalanx.errors import MismatchError
from phalanx.optim.flat import Flat
from phalanx.optim.outer import OuterParameters


class Rounds(ABC):
    """`Rounds` count the steps of `optimizer`, and run a round every `sync_every` steps. Construction is collective.

    Counting starts at construction. Leaving the context calls `finish`, or `abandon` if an exception ended the block.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        check_kinds(self._name, model, optimizer)
        if not (isinstance(sync_every, int) and sync_every >= 1):
            raise ValueError(f"{self._name}: sync_every must be a number of steps, 1 or more, got {sync_every!r}")
        self.sync_every = sync_every
        self.process_group = group = require_group(process_group, self._name)
        _refuse_averaged(self._name, model, optimizer, group)
        self.local_steps = 0
        """The number of steps of this rank since the last round."""
        self.num_rounds = 0
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not self._named:
            raise ValueError(f"{self._name}: the model has no parameter that requires a gradient")
        stepped = {id(parameter) for of in optimizer.param_groups for parameter in of["params"]}
        if not any(id(parameter) in stepped for _, parameter in self._named):
            raise ValueError(
                f"{self._name}: {type(optimizer).__name__} holds no parameter of this model, so the model would never "
                "change. Build it from the model's own model.parameters()"
            )
        self._model = model
        self._places = _find_buffers(model)
        others = _find_others(model, [*(parameter for _, parameter in self._named), *self._buffers])
        _verify_same(self._name, [*self._named, *others], f"sync_every={sync_every}", group)
        self._parameters: list[Tensor] = [parameter for _, parameter in self._named]
        _broadcast_once([tensor for _, tensor in others], group)
        self._flat = Flat(self._find_tensors, group=group)
        self._flat.copy_in()
        self._flat.broadcast(group)
        self._flat.copy_out()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    _name: str
    ranks_differ = True
    """Whether ranks have different values, so that a checkpoint must not mix several ranks' values."""

    _outer: OuterParameters | None = None
    """The parameters that are equal on all ranks between rounds, if any."""

    @property
    def _buffers(self) -> list[Tensor]:
        """Return the current buffers: a module that writes `self.mean = 0.9 * self.mean + ...` replaces its buffer."""
        return [module.get_buffer(name) for module, name in self._places]

    def _find_tensors(self) -> list[Tensor]:
        return self._parameters + self._buffers

    @abstractmethod
    def _combine(self, *, counting: tuple[int, ...]) -> None:
        """Combine the models of the ranks that count, one or more, into this round's model. All ranks call it."""

    def _after_step(self, _optimizer: Optimizer, _args: Any, _options: Any) -> None:
        self.local_steps += 1
        if self.local_steps >= self.sync_every:
            self._run_round(finished=False, counts=True)

    @torch.no_grad()
    def _run_round(self, *, finished: bool, counts: bool) -> bool:
        """Run one round; return whether all ranks have finished."""
        self._refuse_newcomers()
        group = self.process_group
        counts_of_all = torch.zeros(group.size() + 1, dtype=torch.int64, device=self._parameters[0].device)
        counts_of_all[group.rank()], counts_of_all[-1] = counts, finished
        dist.all_reduce(counts_of_all, group=group)
        *counted, num_finished = counts_of_all.tolist()
        counting = tuple(rank for rank, one in enumerate(counted) if one)
        if counting:
            self._combine(counting=counting)
            self.num_rounds += 1
        self.local_steps = 0
        return bool(num_finished == group.size())

    def _refuse_newcomers(self) -> None:
        """Refuse parameters that were added or unfrozen since construction: no round would combine them.

        Raises:
            RuntimeError: there is such a parameter; the message names the first.
        """
        trained = {id(parameter) for parameter in self._parameters}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                raise RuntimeError(
                    f"{self._name}: parameter {name!r} needs a gradient, but was missing or frozen when "
                    f"{self._name} was constructed, so every rank would train its own copy of it. Call finish() before "
                    f"you add or unfreeze parameters, and construct {self._name} again afterwards, on every rank."
                )

    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Continue in another group, after ranks were lost or joined. All its ranks call it, then call `catch_up`."""
        self.process_group = process_group
        self._flat = Flat(self._find_tensors, group=process_group)

    def catch_up(self, *, is_new: bool) -> None:
        """Run an extra round, in which new ranks do not count, and continue from its result. All ranks call it.

        The steps of a lost rank since the last round are lost. A rank on which a round failed that others completed
        receives the common values from those ranks. With an outer optimizer, only ranks with steps count: if ranks that
        have just completed a round counted, the outer parameters would move again.
        """
        newest, root, is_torn = self._find_newest(is_new=is_new)
        is_behind = is_new or self.num_rounds < newest
        if is_torn and self._outer is not None:
            self._outer.share(root, self.process_group)
        self.num_rounds = newest
        may_count = self.local_steps > 0 or (is_torn and self._outer is None)
        self._run_round(finished=False, counts=may_count and not is_behind)
        if is_torn and self.num_rounds == newest:
            self._catch_up_without_round(root)

    def _catch_up_without_round(self, root: int) -> None:
        """Copy the result of the latest round from `root` to ranks that missed it, if no rank stepped. Collective."""
        return None

    def _find_newest(self, *, is_new: bool) -> tuple[int, int, bool]:
        """Return the latest completed round, the first rank that ran it, and whether any rank missed it. Collective."""
        group = self.process_group
        completed = torch.zeros(group.size(), dtype=torch.int64, device=self._parameters[0].device)
        completed[group.rank()] = -1 if is_new else self.num_rounds
        dist.all_reduce(completed, group=group)
        by_rank = completed.tolist()
        newest = max(by_rank)
        old = [number for number in by_rank if number >= 0]
        return max(newest, 0), by_rank.index(newest), min(old, default=0) < newest

    def finish(self) -> None:
        """Run rounds until every rank has finished; then all have the same model. All ranks call it."""
        self._hook.remove()
        while not self._run_round(finished=True, counts=self.local_steps > 0):
            pass
        combined = {id(buffer) for buffer in self._buffers}
        counters = [buffer for buffer in self._model.buffers() if id(buffer) not in combined]
        _broadcast_once([one for one in counters if one.layout is torch.strided], self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step in its round, and the number of rounds. Save every rank's model, too: they differ."""
        return {"local_steps": self.local_steps, "num_rounds": self.num_rounds}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved step of a round; the caller loads the model and the optimizer."""
        self.local_steps = state_dict["local_steps"]
        self.num_rounds = state_dict["num_rounds"]

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Run no more rounds, not even a last one: the other ranks detect the loss when this process ends."""
        self._hook.remove()


def check_kinds(name: str, model: Any, *optimizers: Any) -> None:
    """Check that `model` is a module, and `optimizers` are optimizers.

    Raises:
        TypeError: an argument is of another type; the message has the argument.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be a torch.nn.Module, got {model!r}")
    for one in optimizers:
        if isinstance(one, type) or not hasattr(one, "register_step_post_hook"):
            raise TypeError(f"{name}: the optimizer must be a torch.optim.Optimizer, got {one!r}")


def _find_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and name of each buffer that is averaged: of floating or complex dtype, shared ones once."""
    places: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() or buffer.is_complex():
                places.setdefault(id(buffer), (module, name))
    return list(places.values())


def _find_others(model: nn.Module, combined: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return by name the tensors that no round changes: frozen parameters and integer buffers."""
    known = {id(tensor) for tensor in combined}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [(name, one) for name, one in named if id(one) not in known and one.layout is torch.strided]


@torch.no_grad()
def _broadcast_once(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with rank 0's on every rank. All ranks call it."""
    flat = Flat(tensors)
    flat.copy_in()
    for block in flat.blocks:
        dist.broadcast(block.view(torch.uint8), group=group, group_src=0)  # bytes of any dtype
    flat.copy_out()


def _refuse_averaged(name: str, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Refuse a model or optimizer that the same ranks already average or share at every step.

    Raises:
        ValueError: the model or the optimizer is refused; the message says why.
    """
    averaging = [module for module in model.modules() if hasattr(module, "require_backward_grad_sync")]
    for one in itertools.chain(averaging, [optimizer]):
        theirs = getattr(one, "process_group", None)
        if not isinstance(theirs, dist.ProcessGroup):
            continue
        common = set(dist.get_process_group_ranks(theirs)) & set(dist.get_process_group_ranks(group))
        if len(common) > 1:
            raise ValueError(
                f"{name}: {type(one).__name__} already synchronizes ranks {sorted(common)} at every step. Pass "
                f"{name} the bare model and a plain optimizer, or use groups with only one rank in common, such as "
                f"DistributedDataParallel inside each host and {name} between hosts"
            )


def _verify_same(name: str, named: Sequence[tuple[str, Tensor]], settings: str, group: dist.ProcessGroup) -> None:
    """Check that all ranks have the same tensors and settings. All ranks call it, and all raise or none."""
    mine = settings, [(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    for rank, (theirs, forms) in enumerate(everyone):
        if (theirs, forms) == everyone[0]:
            continue
        differing = next((p for p in itertools.zip_longest(forms, everyone[0][1]) if p[0] != p[1]), None)
        fact = (
            f"rank {rank} has {theirs}, rank 0 has {everyone[0][0]}"
            if differing is None
            else f"rank {rank} has the tensor {differing[0]} where rank 0 has {differing[1]}"
        )
        raise MismatchError(
            f"{name}: the ranks differ: {fact}.\nBuild the model and {name} from the same arguments on every rank.",
            calls={r: f"{one[0]}, {len(one[1])} tensors" for r, one in enumerate(everyone)},
        )
