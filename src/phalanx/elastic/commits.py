"""`Commits` records each commit of a `State`, and restores the latest one, for `elastic.run` and its group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from phalanx._base.log import get_logger
from phalanx._comm.backend import rendezvous
from phalanx._comm.diagnostics.progress_page import open_page
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.objects import Objects
from phalanx.elastic.points import COMMIT, reached
from phalanx.elastic.position import DataPosition, Mark
from phalanx.elastic.rebind import averaging_modules
from phalanx.elastic.small_state import NO_VALUES, SmallState
from phalanx.elastic.state_transfer import StatePart, ValuePart
from phalanx.elastic.step import StepTracker

_logger = get_logger(__name__)


class LatestCommit:
    """A `LatestCommit` is the commit to which a loss returns this rank: its number, epoch and step, and small state.

    The end of an epoch is a commit as well, so commit numbers run ahead of steps.
    """

    __slots__ = ("epoch", "number", "small", "step")

    def __init__(self) -> None:
        self.number = self.epoch = self.step = 0
        self.small = NO_VALUES


class Commits:
    """`Commits` holds the objects and values of a `State`, the step in progress, and the latest commit.

    Arguments:
        things: the objects, by name.
        values: the plain values by name, with "epoch" and "step"; the State reads and writes the same dict.
    """

    def __init__(self, things: dict[str, Any], values: dict[str, Any]) -> None:
        self.values = values
        self.objects = Objects(things)
        self.latest = LatestCommit()
        self.position: DataPosition | None = None
        """The position in the data, if there is a sampler."""
        self.mark: Mark | None = None
        """The position in the data at the latest commit."""
        self.form = ", ".join(f"{name}={type(thing).__name__}" for name, thing in things.items())
        """The names and kinds of the objects, which must be the same on all ranks."""
        self._page = open_page(rendezvous.agent_address())  # `phalanx top` reads the progress of this rank here
        self._has_warned_idle = False
        self._restore_random: Callable[[], None] | None = None
        self._is_restored = False  # whether the latest commit was restored, and no loader has begun a pass since
        # by loader with persistent workers: the number of the commit after which it drew their seed
        self._drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._small = SmallState(self.objects, values)
        if self.objects.sampler is not None:
            self.position = DataPosition(self.objects.sampler, self._on_iterator)
        self.tracker = StepTracker(self.objects, None if self.position is None else self.position.mark)
        """The step in progress."""
        # settings of layers and wrappers that no part contains, as of the latest commit
        self._switches = ModuleModes(self.objects)
        self.save()

    @property
    def num_steps(self) -> int:
        """Return the number of committed steps."""
        return int(self.values["step"])

    # -- called by the loop ---------------------------------------------------------------------------------------

    def count_samples(self, samples: int) -> None:
        if self.position is None:
            raise ValueError(
                f"State.commit(samples={samples}): State has no sampler, so nothing is counted. Remove samples=."
            )
        if self.objects.rounds or self.objects.sharded:
            # After a loss such a step may count as done without its commit, and only the commit knows its samples.
            names = ", ".join(sorted({type(thing).__name__ for thing in (*self.objects.rounds, *self.objects.sharded)}))
            raise ValueError(
                f"State.commit(samples={samples}): State has {names}, whose updates cannot always be undone after a "
                "loss, so a step may count although no commit has reported its samples. Remove samples=, and take "
                "from the loader only the batches that the step trains on (no prefetcher)."
            )
        began = self.mark is not None and self.mark.is_in_pass_of(self.position.mark())
        if began and not self.position.is_counted:
            raise ValueError(
                f"State.commit(samples={samples}): the epoch's first commit had no samples=; pass it in every commit"
            )
        self.position.count(samples)

    def commit(self, *, is_step: bool) -> None:
        reached(COMMIT)
        latest, values, tracker = self.latest, self.values, self.tracker
        runner = tracker.runner
        number = latest.number + 1
        if runner is not None:
            small = self._small.capture(values)
            tracker.begin_commit(number, small)
            latest.small = small
        latest.number = number
        tracker.end()
        if is_step:
            self._switches.save()
            values["step"] += 1
            self._page.commit(values["step"], 0 if self.position is None else self._advance(self.position))
        else:
            values["epoch"] += 1
            self._switches.save_all()
            if self.position is not None:
                self.position.end_epoch()
                self.mark = Mark(values["epoch"], None, 0)
        latest.epoch, latest.step = values["epoch"], values["step"]
        if runner is not None:
            tracker.schedulers_and_scalers.save(is_step=is_step)
            runner.after_commit()

    def _advance(self, position: DataPosition) -> int:
        """Record the position in the data; return how many samples of this rank the step has used."""
        last, mark = self.mark, position.mark()
        self.mark = mark
        if mark.used and not self._has_warned_idle and last is not None and mark.is_at(last):
            self._has_warned_idle = True
            _logger.warning(
                "phalanx.elastic: step %d was committed, but the loader has yielded no sample since the previous step. "
                "If the loop prefetches batches, the loss of a rank skips the prefetched batches that it has not used: "
                "pass how many samples of this rank each step has used, state.commit(samples=len(batch)). If the loop "
                "makes several steps with one batch, commit after the last step.",
                self.values["step"] - 1,
            )
        return position.samples_between(last, mark)

    def save(self) -> None:
        """Save the current small state, schedulers and scalers as those of the latest commit."""
        latest = self.latest
        latest.small = self._small.capture(self.values)
        latest.epoch, latest.step = self.values["epoch"], self.values["step"]
        self.tracker.schedulers_and_scalers.save()

    def data_position(self) -> dict[str, Any] | None:
        """Return the position in the data at the latest commit, in the form of the sampler's `state_dict`, or None."""
        if self.position is None:
            return None
        mark = self.mark or self.position.mark()
        return {**self.position.sampler.state_dict(), "epoch": mark.epoch, "consumed": mark.consumed}

    def load_data_position(self, position: Mapping[str, Any] | None) -> None:
        """Set the position in the data, before `phalanx.elastic.run`."""
        if self.position is not None and position is not None:
            self.position.sampler.load_state_dict(position)
            self.mark = Mark(position["epoch"], None, position["consumed"])
            self.save()

    def resume_with(self, set_random: Callable[[], None]) -> None:
        """Record that `set_random` restores the random states of the latest commit."""
        self._is_restored = True
        if self.mark is not None:  # also on a rank that has just joined: a loss in its first step returns it here
            self._restore_random = set_random

    def _on_iterator(self, loader: Any, is_new: bool) -> None:
        """Set the random states to what they would be here in a job without losses.

        In such a job the loader draws no seed for its workers inside an epoch; with `persistent_workers` it draws one
        in the job's first epoch only. So the seed that a loader draws when it resumes inside an epoch must not count.
        If the workers have survived the loss, and drew their seed after the commit that was restored, draw it again.
        """
        again, self._restore_random = self._restore_random, None
        is_restored, self._is_restored = self._is_restored, False
        lasts = bool(getattr(loader, "persistent_workers", False))
        if again is not None and ((is_new and lasts) or (self.mark is not None and self.mark.is_inside)):
            again()
        elif is_new and lasts:
            self._drawn[loader] = self.latest.number
        elif is_restored and self._drawn.get(loader) == self.latest.number and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()  # as torch's loader does for its iterator

    # -- called by the runner -------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Start counting commits from 0, and discard what was recorded in an earlier `elastic.run` of this State."""
        if self.latest.number and self.position is not None:
            self.mark = self.position.next_pass()
        self.latest.number, self._restore_random = 0, None
        self._switches.save_all()
        self._drawn.clear()
        self._is_restored = False
        self.tracker.begin_run()
        self.save()

    def count_as_done(self, number: int) -> None:
        """Count the step as done: its update is complete, and only its commit is missing.

        Unless its commit had begun, the position in the data is that of the update: batches fetched later are unused.
        """
        mark = None if self.tracker.is_committing else self.tracker.mark
        self.tracker.count(self.values["step"])
        self.latest.number = number
        self.values["step"] += 1
        self._switches.save()
        if self.position is not None:
            self.mark = mark or self.position.mark()
        self.save()

    def roll_back_values(self) -> None:
        latest = self.latest
        self._small.restore(latest.small)
        self.values["epoch"], self.values["step"] = latest.epoch, latest.step

    def parts(self) -> list[StatePart]:
        """Return the parts that are the same on every rank, in the order in which they are transferred."""
        return [*self.objects.parts(), ValuePart(self._get_progress, self._set_progress)]

    def _get_progress(self) -> Any:
        mark = self.mark
        where = None if mark is None else (mark.epoch, mark.consumed)
        return {
            "number": self.latest.number,
            "small": tuple(self.latest.small),
            "position": (self.latest.epoch, self.latest.step),
            "where": where,
            "switches": self._switches.saved,
            "late": self.tracker.wait_history,
        }

    def _set_progress(self, progress: Any) -> None:
        latest = self.latest
        latest.number = progress["number"]
        latest.small = Frozen(*progress["small"])
        latest.epoch, latest.step = progress["position"]
        self._switches.saved = progress["switches"]
        self.tracker.wait_history = progress["late"]
        where = progress["where"]
        self.mark = None if where is None else Mark(where[0], None, where[1])

    def restore(self, rank: int, world_size: int) -> None:
        """Restore all objects to the latest commit, once this rank has its state, its own or a received one."""
        self.tracker.end()
        self.tracker.forget_backward()
        self.roll_back_values()
        self._switches.restore()
        for optimizer in self.objects.optimizers if self.values["step"] else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it, also on a rank that has just joined
        for scaler in self.objects.scalers:
            scaler._per_optimizer_states.clear()
        for module in self.objects.modules:
            for parameter in module.parameters():
                parameter.grad = None
        if self.position is not None:
            self.position.sampler.regroup(world_size, rank)
            if self.mark is not None:
                self.position.seek(self.mark.epoch, self.mark.consumed)
                self.mark = Mark(self.mark.epoch, None, self.mark.consumed)
        self.save()


class ModuleModes:
    """`ModuleModes` saves and restores layers' train/eval mode, and whether wrappers' next forward broadcasts buffers.

    A loss may occur during a validation or a gradient accumulation, for which the loop has changed these switches.

    Cost: one check of each layer in each commit.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._wrappers: list[Any] = list(averaging_modules(objects.modules))
        self._layers: list[nn.Module] = []
        self.saved: tuple[list[bool], list[bool]] = [], []
        """Whether each layer is in train mode, and whether each wrapper's next forward broadcasts rank 0's buffers."""

    def save_all(self) -> None:
        """Save the switches at the end of an epoch, after which the loop sets them for the next one."""
        self._layers = list(self._objects.layers())
        self.saved = [layer.training for layer in self._layers], self._broadcasts()

    def save(self) -> None:
        """Save the switches at the commit of a step.

        A loop may commit in eval mode and return to train mode after the commit, and that return is not repeated after
        a loss. So the layers' modes are those of the latest commit at which all models that have an optimizer were in
        train mode.
        """
        modes = self.saved[0]
        if all(module.training for module in self._objects.trained):
            modes = [layer.training for layer in self._layers]
        self.saved = modes, self._broadcasts()

    def _broadcasts(self) -> list[bool]:
        return [wrapper.require_forward_param_sync for wrapper in self._wrappers]

    def restore(self) -> None:
        """Restore the saved switches of all modules."""
        modes, broadcasts = self.saved
        self._layers = list(self._objects.layers())
        for layer, trains in zip(self._layers, modes, strict=False):
            layer.training = trains
        for wrapper, is_due in zip(self._wrappers, broadcasts, strict=True):
            wrapper.require_forward_param_sync = is_due
