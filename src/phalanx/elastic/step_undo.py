"""Keep what an update is about to change, so that a step can be taken back that a loss interrupts after its update.

    backward │ optimizer.step │ all_reduce(loss) │ scheduler.step │ commit        one collective is behind the update
    backward │ optimizer.step │ backward │ optimizer.step         │ commit        two optimizers, as of a GAN

A rank interrupted there has parameters that are no longer the latest commit's, and not yet those of the next.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx._base.log import get_logger
from phalanx._comm.backend.skeleton import join, split
from phalanx._comm.transport.tensors import copy_all
from phalanx.elastic.hand_over import Part

_logger = get_logger(__name__)


class StepUndo:
    """`StepUndo` keeps a copy of what `parts` hold. Cost: their memory, and a copy in each step that takes one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._structure: Any = None  # None if nothing is kept
        self._copies: list[Tensor] = []

    @property
    def is_kept(self) -> bool:
        """Return whether the step can be taken back."""
        return self._structure is not None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the parts hold now."""
        tensors: list[Tensor] = []
        structure = split([part.show() for part in self._parts], tensors)
        forms = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        if forms == [(t.shape, t.stride(), t.dtype, t.device) for t in self._copies]:
            if tensors:
                copy_all(self._copies, [t.detach() for t in tensors])
        else:
            self._copies = [t.detach().clone() for t in tensors]
        self._structure = structure

    def end_step(self, *, drop: bool) -> None:
        """Forget what was kept; with `drop`, release its memory, too."""
        self._structure = None
        if drop:
            self._copies = []

    @torch.no_grad()
    def give_back(self) -> None:
        values = join(self._structure, self._copies)
        for part, value in zip(self._parts, values, strict=True):
            part.take(value)
        self.end_step(drop=True)  # the tensors are the optimizer's now


def _count(scheduler: LRScheduler) -> Any:
    """Return something that differs once a scheduler has stepped; for a ChainedScheduler, also its inner ones'."""
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), [_count(one) for one in inner]


def _copy_state(scheduler: LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    """Copy a scheduler's state, in which its own methods may be: they stay those of this scheduler."""
    memo = {id(one): one for one in (*_with_inner(scheduler), getattr(scheduler, "optimizer", None))}
    return copy.deepcopy(state, memo)


def _with_inner(scheduler: LRScheduler) -> list[LRScheduler]:
    return [scheduler, *(each for one in getattr(scheduler, "_schedulers", ()) for each in _with_inner(one))]


class SchedulersAndScalers:
    """`SchedulersAndScalers` keeps these, and the options that they change, which may be ahead of the last update.

    This happens where a scheduler steps at the end of an epoch, and a rank is lost in the validation after it.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], scalers: Sequence[Any], optimizers: Sequence[Optimizer]):
        self._schedulers, self._scalers, self._optimizers = schedulers, scalers, optimizers
        self._seen: Any = None
        self._kept: Any = None
        self._watches = False  # whether a scheduler that steps now does so behind the commit of a step
        self._has_told = False

    def _look(self) -> list[Any]:
        seen: list[Any] = []
        for scheduler in self._schedulers:
            seen.append(_count(scheduler))
        for scaler in self._scalers:
            seen.append(scaler.state_dict())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                seen.append((id(rate), rate._version) if isinstance(rate, Tensor) else rate)
        return seen

    def tell_of_steps_behind_commit(self) -> None:
        """Warn once of schedulers that have stepped since the commit of a step: a backward is about to begin."""
        if not self._watches:
            return
        self._watches = False
        if [_count(scheduler) for scheduler in self._schedulers] != self._seen[: len(self._schedulers)]:
            self._has_told = True
            _logger.warning(
                "phalanx.elastic: a scheduler has stepped between state.commit() and the next backward. If that was "
                "behind the commit, and not with the next batch, its step will be missing after a loss, and the "
                "learning rate be that of the step before: step the scheduler before the commit."
            )

    def keep(self, *, is_step: bool = False) -> None:
        """Keep their current states, which is cheap if nothing has changed; `is_step` in the commit of a step."""
        self._watches = is_step and bool(self._schedulers) and not self._has_told
        seen = self._look()
        if seen == self._seen:
            return
        self._kept = (
            [_copy_state(s, s.state_dict()) for s in self._schedulers],
            [s.state_dict() for s in self._scalers],
            [
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ],
        )
        self._seen = seen

    def give_back(self) -> None:
        """Restore the states that were kept."""
        if self._look() == self._seen:
            return
        schedulers, scalers, options = self._kept
        for scheduler, state in zip(self._schedulers, schedulers, strict=True):
            scheduler.load_state_dict(_copy_state(scheduler, state))
        for scaler, state in zip(self._scalers, scalers, strict=True):
            scaler.load_state_dict(copy.deepcopy(state))
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        # a group that the loop has added since is handled by the undo
        for group, kept in zip(groups, options, strict=False):
            group.update(kept)
        self._seen = None
        self.keep()
