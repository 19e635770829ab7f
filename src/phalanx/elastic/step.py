"""Track the current step: whether its backward is running, and whether its update was made, counted or undone.

forward │ backward │ optimizer.step │ commit
        ╰ open ────╯ ╰ stepped: 1 ──╯ 2 until here
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.skeleton import join, split
from phalanx._comm.transport.tensors import copy_all
from phalanx.ddp.graph import tensors_in
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.objects import Objects
from phalanx.elastic.position import Mark
from phalanx.elastic.state_transfer import StatePart
from phalanx.optim import ZeroRedundancyOptimizer

_LOSES = "phalanx.elastic does not detect the end of a backward"
_backward_number: Any = find("torch._C._current_graph_task_id", loses=_LOSES)
_engine: Any = find("torch.autograd.Variable._execution_engine", loses=_LOSES)

_logger = get_logger(__name__)
TRIAL_STEPS = 100  # in this many first steps ranks make a copy and wait, to find out whether later steps need that


class Runner(Protocol):
    """A `Runner` is notified of a rank's backwards and commits while the job runs."""

    def before_commit(self, number: int, small: Frozen, counted: tuple[int, int]) -> bool:
        """Prepare commit `number` with its small state; return whether the ranks wait for each other in such commits.

        `counted` is the result of `count_collectives` just before the commit. In the run's first commits the ranks
        wait regardless of the result.
        """

    def after_commit(self) -> None: ...

    def count_collectives(self) -> tuple[int, int]:
        """Return two counters, of which at least one changes whenever the ranks have waited for each other."""

    def require_group(self) -> None:
        """Raise if the group has ended because a rank is lost. All ranks call this."""

    def before_backward(self) -> None:
        """Record the random states and buffers as the step's forward left them, before any gradient is sent."""


class StepTracker:
    """`StepTracker` tracks, with hooks on `objects`, how far the current step has got, while there is a `runner`."""

    def __init__(self, objects: Objects, find_mark: Callable[[], Mark] | None) -> None:
        self._find_mark = find_mark
        self.runner: Runner | None = None
        self.stepped = 0  # 1 in an optimizer's step, 2 after it, until the commit
        self.num_updates = 0  # since the commit
        self.mark: Mark | None = None  # the data's position at the latest update
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
        trains_apart = objects.rounds or objects.pipelines
        self._undo = None if trains_apart else StepUndo(objects.parts_of_update())
        # the number of updates of each sharded optimizer before the step's first update
        self._num_updates: list[int] = []
        # whether to save the state before each update, to undo a step that is interrupted after it; the first steps
        # decide this
        self._saves_updates = True
        self._num_without_wait = 0  # how many of the first steps did not wait after the update
        self._has_waited = False
        self._open_backward: int | None = None  # autograd's number of a backward that has begun and not ended
        self._has_failed = False  # whether a backward had not ended when the next one began
        self._at_update: tuple[int, int] | None = None

    @property
    def wait_history(self) -> tuple[bool, bool, int]:
        """Return whether the state is saved before updates, whether a step has waited, and how many have not."""
        return self._saves_updates, self._has_waited, self._num_without_wait

    @wait_history.setter
    def wait_history(self, wait_history: tuple[bool, bool, int]) -> None:
        self._saves_updates, self._has_waited, self._num_without_wait = wait_history

    def begin_run(self) -> None:
        """Discard what earlier runs have recorded: another function may train these objects now."""
        self.end()
        self.forget_backward()
        self.wait_history = True, False, 0
        self._forward_changes.forget()

    def watch_other_optimizers(self) -> RemovableHandle:
        """Warn of optimizers outside State that step parameters of its models, until the handle is removed.

        An optimizer inside another one (a sharded optimizer, a wrapper) steps during the outer one's step, and is not
        reported.
        """
        known = {id(one) for one in self._objects.optimizers}

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) in known or self.stepped == 1 or self._objects.rounds:
                return
            known.add(id(optimizer))
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, module in self._objects.named_modules.items():
                if any(id(p) in updated for p in module.parameters()):
                    _logger.warning(
                        "phalanx.elastic: %s updates parameters of %r, but State does not have this optimizer. When a "
                        "rank is lost, its replacement creates a new optimizer, so the ranks may train different "
                        "parameters. Pass the optimizer to State.",
                        type(optimizer).__name__,
                        name,
                    )
                    return

        return register_optimizer_step_post_hook(after_step)

    # -- hooks ---------------------------------------------------------------------------------------------------

    @untraced
    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self.runner is not None and module.training and torch.is_grad_enabled():
            self._forward_changes.begin_step()

    def _before_step(self, *_: Any) -> None:
        self.require_backward()
        if self.stepped == 0:
            self._forward_changes.find_changes()
        if self._at_update is None and self.runner is not None and self._undo is not None:
            # the ranks of sharded optimizers wait for each other at the end of an update
            if self._saves_updates or self._objects.sharded:
                self._undo.save()
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
        _call_before_backward(output, self._before_backward)

    @untraced
    def _before_backward(self, *_: Any) -> None:
        if self.runner is None:
            return
        self.schedulers_and_scalers.warn_of_steps_after_commit()
        task = _backward_number()
        if task not in (-1, self._open_backward):
            self._has_failed |= self._open_backward is not None
            self._open_backward = task
            # queued twice, so that it runs after the callbacks in which wrappers wait
            _after_backward(lambda: _after_backward(self._end_backward))
        self.runner.before_backward()

    def _end_backward(self) -> None:
        self._open_backward = None

    def require_backward(self) -> None:
        """Raise if the loop has caught and ignored a loss, because its work since then is invalid.

        A backward that failed on all ranks with an error in the loop's own code is allowed.
        """
        if not self._has_failed and (self._open_backward is None or self._open_backward == _backward_number()):
            return
        if self.runner is not None and not self._objects.rounds:
            self.runner.require_group()
        self._open_backward, self._has_failed = None, False

    # -- the end of a step ----------------------------------------------------------------------------------------

    def begin_commit(self, number: int, small: Frozen) -> None:
        """Prepare the commit of a step that the loop has completed."""
        if self.runner is not None:
            self.require_backward()
            self.is_committing = True
            at_commit = self.runner.count_collectives()
            waits = self.runner.before_commit(number, small, at_commit)
            if self.stepped:
                self._record_wait(waits or self._at_update not in (None, at_commit))

    def _record_wait(self, has_waited: bool) -> None:
        """Record whether this rank has waited for others between the update and the commit of this step.

        A loss could interrupt the step there. Once a step has waited, the state is saved before each later update, to
        undo it. Without such a step, saving stops after `TRIAL_STEPS` steps, which are many, because a loop may, for
        example, reduce its loss in every tenth step only. A commit itself waits if a rank has changed its own state
        after the update.
        """
        if has_waited:
            self._saves_updates = self._has_waited = True
        elif not self._has_waited:
            self._num_without_wait += 1
            self._saves_updates = self._num_without_wait < TRIAL_STEPS

    def end(self) -> None:
        """End a step that was committed or undone."""
        self.stepped = self.num_updates = 0
        self.mark = None
        self._forward_changes.end_step()
        self._at_update = None
        self.is_committing = False
        if self._undo is not None and self._undo.is_saved:
            self._undo.end_step(drop=not self._saves_updates)

    def forget_backward(self) -> None:
        """Forget a backward that began before a loss."""
        self._open_backward, self._has_failed = None, False

    # -- an interrupted step -------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Return whether parameters and optimizers, which no record holds, are as they were at the latest commit."""
        return self.stepped == 0

    @property
    def progress(self) -> tuple[int, bool]:
        """Return the number of updates since the latest commit, and whether the next commit has begun."""
        return self.num_updates, self.is_committing

    def undo_update(self, step: int) -> None:
        """Undo an uncommitted update after an error in step number `step`, if it can be undone.

        The interrupted update of a sharded optimizer has already been undone or completed on all ranks. A completed
        update is undone as well, since the loop has not run its code after the update.
        """
        if self.stepped == 1 and self._objects.rounds:  # the update is complete, and the round that follows it failed
            self._after_step()
        if self.stepped and self._undo is not None and self._undo.is_saved and self._can_roll_back_shards():
            self._undo.restore()
            for optimizer, number in zip(self._objects.sharded, self._num_updates, strict=True):
                optimizer.roll_back(number)
            self.stepped = 0
            self._forward_changes.restore()
        if self.stepped == 1 and len(self._objects.sharded) == len(self._objects.optimizers):
            updated = {one.has_updated for one in self._objects.sharded}
            if updated == {True}:
                self._after_step()
            elif updated == {False} and self._undo is None:  # otherwise this step has made other updates before
                self.stepped = 0
        if not self.stepped:
            self.schedulers_and_scalers.restore()
            for number in self._forward_changes.restore()[:1]:
                _logger.warning(
                    "phalanx.elastic: %s changed before the update for the first time in step %d. That step is "
                    "repeated, so it has changed twice on this rank. In later steps it is restored.",
                    self._watched[number],
                    step,
                )

    def _can_roll_back_shards(self) -> bool:
        pairs = zip(self._objects.sharded, self._num_updates, strict=True)
        return all(optimizer.can_roll_back(number) for optimizer, number in pairs)

    def count(self, step: int) -> None:
        """Count the update of step number `step`, whose commit is missing."""
        if not self._objects.rounds and self.stepped == 2 and not self.is_committing:
            self._saves_updates = self._has_waited = True
            _logger.warning(
                "phalanx.elastic: a rank was lost between update and commit of step %d. The step counts, but the code "
                "after the failed collective (such as a scheduler's step%s) did not run for it. %s",
                step,
                "" if self.num_updates < 2 else f", or updates after the first {self.num_updates}",
                "Commit after each update: only the latest update of a sharded optimizer can be undone."
                if self._objects.sharded
                else "From now on, such a step is undone.",
            )
        self.end()


def _call_before_backward(output: Any, function: Callable[..., None]) -> None:
    """Call `function` when gradients of `output` are about to be computed.

    If no tensor is found in `output`, as inside an object of the user's own class, call `function` at once.
    """
    nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(function)
    if not nodes:
        function()


def _after_backward(function: Callable[[], None]) -> None:
    """Call `function` once the current backward has succeeded."""
    _engine.queue_callback(function)


# Restore tensors that a loop changes before its update, so that a repeated step changes them only once.
#
#     momentum encoder changes │ forward │ backward, where a rank is lost        on survivors the encoder has changed


class ForwardChanges:
    """`ForwardChanges` finds and restores the `tensors` that forwards change and no optimizer updates.

    A change through `.data` does not change a tensor's version, so the first step compares values; a `.data` change
    that first occurs later is missed.

    Cost: a check of each tensor's version, twice a step; and a copy, before each step, of the tensors that forwards
    change. In the first step all tensors are copied, and compared with the copies.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._changing: set[int] | None = None  # positions in `tensors`; None before they are known
        self._copies: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # by position: the address of the memory that was copied
        self._versions: list[int] | None = None  # the versions when the step began; None outside a step

    def forget(self) -> None:
        """Forget which tensors forwards change; the next step finds them again."""
        self._changing, self._versions = None, None
        self._copies, self._places = {}, {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the tensors that forwards may change, before the first forward of a step."""
        if self._versions is not None or not self._tensors:
            return
        self._versions = [tensor._version for tensor in self._tensors]
        for number in range(len(self._tensors)) if self._changing is None else self._changing:
            tensor, copy = self._tensors[number], self._copies.get(number)
            if copy is None or not _is_alike(copy, tensor):
                self._copies[number] = tensor.detach().clone()
            else:
                copy.copy_(tensor)
            self._places[number] = _place(tensor)

    @torch.no_grad()
    def find_changes(self) -> None:
        """Find the tensors that the forward has changed, just before the update begins."""
        if self._versions is None:
            return
        self._changing = self._changed() | (self._changing or set())
        for number in self._copies.keys() - self._changing:
            del self._copies[number], self._places[number]

    def end_step(self) -> None:
        """End a step that was committed or undone: its copies are no longer valid."""
        self._versions = None

    @torch.no_grad()
    def restore(self) -> list[int]:
        """Restore the changed tensors to their values before the step; return the positions of those without a copy."""
        if self._versions is None:
            return []
        changed = self._changed() | (self._changing or set())
        for number in changed & self._copies.keys():
            tensor, copy = self._tensors[number], self._copies[number]
            if self._places[number] == _place(tensor) and _is_alike(copy, tensor):
                tensor.copy_(copy)
            else:  # the tensor's current memory may be shared with another tensor
                tensor.data = copy.clone()
        self._versions = None
        return sorted(changed - self._copies.keys())

    def _changed(self) -> set[int]:
        """Return the positions of the tensors whose version has changed; in the first step, compare values as well."""
        assert self._versions is not None
        changed = {i for i, (t, v) in enumerate(zip(self._tensors, self._versions, strict=True)) if t._version != v}
        if self._changing is None:
            changed |= {i for i, copy in self._copies.items() if i not in changed and _differ(copy, self._tensors[i])}
        return changed


def _is_alike(copy: Tensor, tensor: Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)


def _differ(copy: Tensor, tensor: Tensor) -> bool:
    if not _is_alike(copy, tensor):
        return True
    try:
        return not torch.equal(copy, tensor)
    except (RuntimeError, TypeError):  # a layout or a subclass that cannot be compared: its version has to suffice
        return False


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


# Copy the state that an update is about to change, to undo a step that a loss interrupts after its update.
#
#     backward │ optimizer.step │ all_reduce(loss) │ scheduler.step │ commit        one collective after the update
#     backward │ optimizer.step │ backward │ optimizer.step         │ commit        two optimizers, as in a GAN
#
# A rank that is interrupted there has parameters of neither the latest commit nor the next.


class StepUndo:
    """`StepUndo` saves a copy of the contents of `parts`, and restores it.

    Cost: the memory of the parts, and one copy in each step that saves.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self._parts = parts
        self._structure: Any = None  # None if nothing is saved
        self._copies: list[Tensor] = []

    @property
    def is_saved(self) -> bool:
        """Return whether the step can be undone."""
        return self._structure is not None

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current contents of the parts."""
        tensors: list[Tensor] = []
        structure = split([part.get_contents() for part in self._parts], tensors)
        forms = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        if forms == [(t.shape, t.stride(), t.dtype, t.device) for t in self._copies]:
            if tensors:
                copy_all(self._copies, [t.detach() for t in tensors])
        else:
            self._copies = [t.detach().clone() for t in tensors]
        self._structure = structure

    def end_step(self, *, drop: bool) -> None:
        """Forget the copies; with `drop`, also release their memory."""
        self._structure = None
        if drop:
            self._copies = []

    @torch.no_grad()
    def restore(self) -> None:
        values = join(self._structure, self._copies)
        for part, value in zip(self._parts, values, strict=True):
            part.load_contents(value)
        self.end_step(drop=True)  # the copies now belong to the optimizer


def _version(option: Any) -> Any:
    """Return a value that changes when this option of a parameter group changes, also in place if it is a tensor."""
    if isinstance(option, Tensor):
        return id(option), option._version
    return option if isinstance(option, (int, float, str, tuple, type(None))) else id(option)


def _count(scheduler: LRScheduler) -> Any:
    """Return a value that changes when a scheduler, or an inner one of a ChainedScheduler, steps."""
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), [_count(one) for one in inner]


def _copy_state(scheduler: LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    """Copy a scheduler's state; bound methods in it stay bound to the same scheduler."""
    memo = {id(one): one for one in (*_with_inner(scheduler), getattr(scheduler, "optimizer", None))}
    return copy.deepcopy(state, memo)


def _with_inner(scheduler: LRScheduler) -> list[LRScheduler]:
    return [scheduler, *(each for one in getattr(scheduler, "_schedulers", ()) for each in _with_inner(one))]


def _remove_groups(optimizer: Optimizer, first: int) -> None:
    """Remove the groups from number `first` on, which the loop has added since the commit and will add again."""
    for group in optimizer.param_groups[first:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[first:]


class SchedulersAndScalers:
    """`SchedulersAndScalers` saves schedulers, gradient scalers, and the options and number of parameter groups.

    All of these may change after the last update: at the end of an epoch, a rank may be lost in the validation after a
    scheduler's step.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], scalers: Sequence[Any], optimizers: Sequence[Optimizer]):
        self._schedulers, self._scalers, self._optimizers = schedulers, scalers, optimizers
        self._saved_versions: Any = None
        self._saved: Any = None
        self._watches = False  # whether a scheduler that steps now does so after the commit of a step
        self._has_warned = False

    def _read_versions(self) -> list[Any]:
        versions: list[Any] = []
        for scheduler in self._schedulers:
            versions.append(_count(scheduler))
        for scaler in self._scalers:
            versions.append(scaler.state_dict())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                versions.append([_version(value) for name, value in group.items() if name != "params"])
        return versions

    def warn_of_steps_after_commit(self) -> None:
        """Warn once if a scheduler has stepped between a step's commit and the backward that is about to begin."""
        if not self._watches:
            return
        self._watches = False
        if [_count(scheduler) for scheduler in self._schedulers] != self._saved_versions[: len(self._schedulers)]:
            self._has_warned = True
            _logger.warning(
                "phalanx.elastic: a scheduler has stepped between state.commit() and the next backward. Unless it "
                "steps with the next batch, a loss of a rank undoes that step, so training continues with the previous "
                "learning rate. "
                "Step the scheduler before the commit."
            )

    def save(self, *, is_step: bool = False) -> None:
        """Save the current states, at little cost if nothing has changed; `is_step`: this is the commit of a step."""
        self._watches = is_step and bool(self._schedulers) and not self._has_warned
        versions = self._read_versions()
        if versions == self._saved_versions:
            return
        self._saved = (
            [_copy_state(s, s.state_dict()) for s in self._schedulers],
            [s.state_dict() for s in self._scalers],
            [
                [
                    {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
                    for group in optimizer.param_groups
                ]
                for optimizer in self._optimizers
            ],
        )
        self._saved_versions = versions

    def restore(self) -> None:
        """Restore the saved states."""
        if self._read_versions() == self._saved_versions:
            return
        schedulers, scalers, options = self._saved
        for scheduler, state in zip(self._schedulers, schedulers, strict=True):
            scheduler.load_state_dict(_copy_state(scheduler, state))
        for scaler, state in zip(self._scalers, scalers, strict=True):
            scaler.load_state_dict(copy.deepcopy(state))
        for optimizer, kept in zip(self._optimizers, options, strict=True):
            for group, saved in zip(optimizer.param_groups, kept, strict=False):
                group.update(saved)
            if not isinstance(optimizer, ZeroRedundancyOptimizer):  # which has moved the parameters of its groups
                _remove_groups(optimizer, len(kept))
        self._saved_versions = None
        self.save()
