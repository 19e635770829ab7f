"""Track the step at hand: whether its backward runs, and whether its update is made, counted or taken back.

forward │ backward │ optimizer.step │ commit
        ╰ open ────╯ ╰ stepped: 1 ──╯ 2 until here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import untraced
from phalanx.elastic.backward import call_before_backward
from phalanx.elastic.forward_changes import ForwardChanges
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.objects import Objects
from phalanx.elastic.position import Mark
from phalanx.elastic.step_undo import SchedulersAndScalers, StepUndo

_LOSES = "phalanx.elastic does not notice when a backward ends"
_backward_number: Any = find("torch._C._current_graph_task_id", loses=_LOSES)
_engine: Any = find("torch.autograd.Variable._execution_engine", loses=_LOSES)

_logger = get_logger(__name__)
TRIAL_STEPS = 100  # in so many steps a copy is taken, and ranks wait for each other, until it is seen where they must


class Runner(Protocol):
    """A `Runner` is told of commits while the job runs."""

    def before_commit(self, number: int, small: Frozen, counted: tuple[int, int]) -> bool:
        """Prepare commit `number`, with its small state; `counted` collectives came before it. Return whether the ranks
        wait for each other there, as they do in each commit like this one.
        """

    def after_commit(self) -> None: ...

    def count_collectives(self) -> tuple[int, int]:
        """Return a number that differs if the ranks have waited for each other."""

    def require_group(self) -> None:
        """Raise if the group is over, because a rank is lost. All ranks call it."""

    def before_backward(self) -> None:
        """Note that what this rank draws for the step, and what its forward changes, is done; gradients follow."""


class StepTracker:
    """`StepTracker` learns by hooks on `objects` how far the loop is in its step; without a `runner`, nothing."""

    def __init__(self, objects: Objects, find_mark: Callable[[], Mark] | None) -> None:
        self._find_mark = find_mark
        self.runner: Runner | None = None
        self.stepped = 0  # 1 in an optimizer's step, 2 after it, until the commit
        self.num_updates = 0  # since the commit
        self.mark: Mark | None = None  # the data's position at the latest of them
        self.is_committing = False
        self._objects = objects
        watched = objects.watched_tensors() if objects.optimizers and not objects.pipelines else {}
        self._watched, self._forward_changes = list(watched.values()), ForwardChanges(list(watched))
        for module in objects.trained if not objects.pipelines else ():
            module.register_forward_hook(self._after_forward)
            if watched:
                module.register_forward_pre_hook(self._before_forward)
        for optimizer in objects.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        self.schedulers_and_scalers = SchedulersAndScalers(objects.schedulers, objects.scalers, objects.optimizers)
        holds_apart = objects.rounds or objects.pipelines
        self._undo = None if holds_apart else StepUndo(objects.parts_of_update())
        # the number of updates of each sharded optimizer before the step's first update
        self._num_updates: list[int] = []
        # whether a step may be interrupted behind its update; the first steps show whether it may
        self._has_late = True
        self._num_quiet = 0  # how many of the first steps could not be interrupted there
        self._was_late = False
        self._open_backward: int | None = None  # autograd's number of a backward that has begun and not ended
        self._has_failed = False  # a backward has not ended, and another one has begun
        self._at_update: tuple[int, int] | None = None

    @property
    def lateness(self) -> tuple[bool, bool, int]:
        """Return whether a step may be interrupted between update and commit, whether one was, how many were not."""
        return self._has_late, self._was_late, self._num_quiet

    @lateness.setter
    def lateness(self, lateness: tuple[bool, bool, int]) -> None:
        self._has_late, self._was_late, self._num_quiet = lateness

    def begin_run(self) -> None:
        """Forget what the steps of an earlier run have shown: another function may train these objects now."""
        self.end()
        self.forget_backward()
        self.lateness = True, False, 0
        self._forward_changes.forget()

    # -- hooks ---------------------------------------------------------------------------------------------------

    @untraced
    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self.runner is not None and module.training and torch.is_grad_enabled():
            self._forward_changes.begin_step()

    def _before_step(self, *_: Any) -> None:
        self.require_backward()
        if self.stepped == 0:
            self._forward_changes.learn()
        if self._at_update is None and self.runner is not None and self._undo is not None:
            # the ranks of sharded optimizers wait for each other at the end of an update
            if self._has_late or self._objects.sharded:
                self._undo.keep()
                self._num_updates = [one.num_updates for one in self._objects.sharded]
            self._at_update = self.runner.count_collectives()
        self.stepped = 1

    def _after_step(self, *_: Any) -> None:
        self.stepped = 2
        self.num_updates += 1
        self.mark = None if self._find_mark is None else self._find_mark()

    @untraced
    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.runner is None or not module.training or not torch.is_grad_enabled():
            return
        call_before_backward(output, self._before_backward)

    @untraced
    def _before_backward(self, *_: Any) -> None:
        if self.runner is None:
            return
        self.schedulers_and_scalers.tell_of_steps_behind_commit()
        task = _backward_number()
        if task not in (-1, self._open_backward):
            self._has_failed |= self._open_backward is not None
            self._open_backward = task
            # behind the callbacks of wrappers, which wait there
            _after_backward(lambda: _after_backward(self._end_backward))
        self.runner.before_backward()

    def _end_backward(self) -> None:
        self._open_backward = None

    def require_backward(self) -> None:
        """Refuse to go on in a loop that swallowed the error of a loss: what it has done since does not count.

        A backward that ended by an error of the loop's own, on all ranks, is the loop's business.
        """
        if not self._has_failed and (self._open_backward is None or self._open_backward == _backward_number()):
            return
        if self.runner is not None and not self._objects.rounds:
            self.runner.require_group()
        self._open_backward, self._has_failed = None, False

    # -- its end -------------------------------------------------------------------------------------------------

    def begin_commit(self, number: int, small: Frozen) -> None:
        """Prepare the commit of a step for which the loop has done everything."""
        if self.runner is not None:
            self.require_backward()
            self.is_committing = True
            at_commit = self.runner.count_collectives()
            waits = self.runner.before_commit(number, small, at_commit)
            if self.stepped:
                self._learn_lateness(waits or self._at_update not in (None, at_commit))

    def _learn_lateness(self, is_late: bool) -> None:
        """Learn whether a step can be interrupted between its update and its commit: then it must be undoable.

        A loop may do so in every tenth step only, when it reduces a loss to be shown: the first steps together tell.
        The same holds if the commit itself must wait for the others, because a rank has changed something behind the
        update that no other rank has and that is not kept yet.
        """
        if is_late:
            self._has_late = self._was_late = True
        elif not self._was_late:
            self._num_quiet += 1
            self._has_late = self._num_quiet < TRIAL_STEPS

    def end(self) -> None:
        """End a step that is committed, or one after which everything is as at the latest commit."""
        self.stepped = self.num_updates = 0
        self.mark = None
        self._forward_changes.end_step()
        self._at_update = None
        self.is_committing = False
        if self._undo is not None and self._undo.is_kept:
            self._undo.end_step(drop=not self._has_late)

    def forget_backward(self) -> None:
        """Forget a backward that has begun before a loss: it does not count."""
        self._open_backward, self._has_failed = None, False

    # -- when it was interrupted ---------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Return whether all that no record holds is as it was at the latest commit."""
        return self.stepped == 0

    @property
    def progress(self) -> tuple[int, bool]:
        """Return how many updates were made since the latest commit, and whether the next commit has begun."""
        return self.num_updates, self.is_committing

    def take_back(self, step: int) -> None:
        """Undo, after an error in step number `step`, an update whose commit is missing, if it can be undone.

        A sharded update that was interrupted has been undone already, or was completed by the others: it is taken back
        as well, as the loop has not done what it does behind it.
        """
        if self.stepped == 1 and self._objects.rounds:  # what failed is its round, which is held behind the update
            self._after_step()
        if self.stepped and self._undo is not None and self._undo.is_kept and self._can_take_back_shards():
            self._undo.give_back()
            for optimizer, number in zip(self._objects.sharded, self._num_updates, strict=True):
                optimizer.take_back(number)
            self.stepped = 0
            self._forward_changes.give_back()
        if self.stepped == 1 and len(self._objects.sharded) == len(self._objects.optimizers):
            updated = {one.has_updated for one in self._objects.sharded}
            if updated == {True}:
                self._after_step()
            elif updated == {False} and self._undo is None:  # else there were other updates in this step before
                self.stepped = 0
        if not self.stepped:
            self.schedulers_and_scalers.give_back()
            for number in self._forward_changes.give_back()[:1]:
                _logger.warning(
                    "phalanx.elastic: %s was changed before the update for the first time in step %d, which is done "
                    "again: on this rank it has changed twice. From the next step on it is kept.",
                    self._watched[number],
                    step,
                )

    def _can_take_back_shards(self) -> bool:
        pairs = zip(self._objects.sharded, self._num_updates, strict=True)
        return all(optimizer.can_take_back(number) for optimizer, number in pairs)

    def count(self, step: int) -> None:
        """Count the update of step number `step`, of which only the commit is missing."""
        if not self._objects.rounds and self.stepped == 2 and not self.is_committing:
            self._has_late = self._was_late = True
            _logger.warning(
                "phalanx.elastic: the loss came between update and commit of step %d. The step counts, but what the "
                "loop does there after the collective that failed (a scheduler's step%s) was not done for it. %s",
                step,
                ", say" if self.num_updates < 2 else f", or an update behind the {self.num_updates} that were made",
                "Commit after each update: of optimizers in shards only the latest can be taken back."
                if self._objects.sharded
                else "From now on such a step is taken back.",
            )
        self.end()


def _after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the current backward has ended, if it ends well."""
    _engine.queue_callback(function)
