"""What training needs to go on: the user's objects by name, and where they stood at the latest commit."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from phalanx.backend import rendezvous
from phalanx.backend.dynamo import untraced
from phalanx.data import DistributedSampler
from phalanx.ddp import DistributedDataParallel
from phalanx.diagnostics.progress_page import open_page
from phalanx.elastic.backward import call_before_backward
from phalanx.elastic.forward_changes import ForwardChanges
from phalanx.elastic.global_batch import GlobalBatch
from phalanx.elastic.hand_over import ModulePart, OptimizerPart, Part, SlicesPart, StatefulPart, ValuePart
from phalanx.elastic.points import COMMIT, reached
from phalanx.elastic.position import DataPosition, Mark
from phalanx.elastic.rebind import averaging_modules
from phalanx.elastic.undo import Followers, Undo
from phalanx.log import get_logger
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.optim.rounds import Rounds
from phalanx.partition.owners import owner_of
from phalanx.pipeline import Pipeline

_logger = get_logger(__name__)
_IMMUTABLE = (int, float, bool, str, bytes, type(None), complex, frozenset)


class Runner(Protocol):
    """Who is told of commits, while the job runs."""

    def before_commit(self, number: int) -> None:
        """Commit `number` is about to be made."""
        ...

    def after_commit(self) -> None:
        """It is made."""
        ...

    def count_collectives(self) -> tuple[int, int]:
        """A number that differs where the ranks have waited for each other."""
        ...

    def require_group(self) -> None:
        """Raise if the group is over, because a rank is lost. Collective."""
        ...

    def before_backward(self) -> None:
        """What this rank draws for the step, and what its forward changes, is done; gradients are to come."""
        ...


class State:
    """Everything that a rank must have to go on where another one stood.

        state = phalanx.elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, best=0.0)

    Each argument is an attribute, under its name. Modules, optimizers, schedulers, gradient scalers, a
    `phalanx.DistributedSampler` and whatever else has `state_dict` and `load_state_dict` are known by their kind; all
    others, `epoch=0` above all, are plain values that go back to what they were at the latest commit.

    The sampler's position is that of the loader; a loop that takes batches ahead of those it trains on (a prefetcher of
    its own) says how many samples a step has used: `commit(samples=n)`.

    With `batch="global"` a step keeps the samples that it had at the start, as many batches as there were ranks: with
    fewer ranks some do several, one after the other, before the update. The loop stays as it is. It needs a sampler,
    and `phalanx.DistributedDataParallel`; docs/elastic.md says what such a loop may not do.

    `commit()` says that a step is done. Without `phalanx.elastic.run` it only counts.

    Raises:
        TypeError: a sampler that cannot say where it stands.
        ValueError: a name that is taken, several samplers, or what `batch="global"` does not go with.
    """

    _things: dict[str, Any]
    _values: dict[str, Any]
    _mutable: set[str]

    def __init__(self, *, batch: str | None = None, **things: Any) -> None:
        if batch not in (None, "global"):
            raise ValueError(f"State: batch must be 'global' or None, got {batch!r}; a value needs another name")
        reserved = [name for name in things if name.startswith("_") or hasattr(type(self), name)]
        if reserved:
            raise ValueError(f"State: {reserved[0]!r} is a name of its own: give the argument another")
        object.__setattr__(self, "_values", {"epoch": 0, "step": 0})
        object.__setattr__(self, "_things", {})
        object.__setattr__(self, "_mutable", set())
        kept: dict[str, Any] = self._things
        for name, thing in things.items():
            if _is_kept_by_state(thing):
                kept[name] = thing
            else:
                setattr(self, name, thing)
        self._page = open_page(rendezvous.agent_address())  # where `phalanx top` sees how far this rank is
        self._number = 0  # of commits, those at the end of an epoch included
        self._stepped = 0  # 1 in an optimizer's step, 2 after it, until the commit
        self._runner: Runner | None = None
        self._position: DataPosition | None = None
        self._mark: Mark | None = None
        self._has_told_idle = False
        self._saved: dict[str, Any] = {}
        self._random_again: Callable[[], None] | None = None
        self._modules = [thing for thing in kept.values() if isinstance(thing, nn.Module)]
        self._optimizers = [thing for thing in kept.values() if isinstance(thing, Optimizer)]
        self._sharded = [one for one in self._optimizers if isinstance(one, ZeroRedundancyOptimizer)]
        self._rounds = [thing for thing in kept.values() if isinstance(thing, Rounds)]
        self._pipelines = [thing for thing in self._modules if isinstance(thing, Pipeline)]
        for name, thing in kept.items():
            if isinstance(thing, nn.Module) and _hides_pipeline(thing):
                raise TypeError(f"State: {name!r} has a Pipeline inside; give State the Pipeline itself")
        self._schedulers = [thing for thing in kept.values() if isinstance(thing, LRScheduler)]
        self._scalers = [thing for thing in kept.values() if isinstance(thing, GradScaler)]
        samplers = [thing for thing in kept.values() if isinstance(thing, DistributedSampler)]
        if len(samplers) > 1:
            raise ValueError("State: one sampler says where the job stands, and it was given several")
        if samplers:
            self._position = DataPosition(samplers[0], self._on_iterator)
        self._global = self._keep_global_batch() if batch is not None else None
        trained = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._trained = [m for m in self._modules if not trained or any(id(p) in trained for p in m.parameters())]
        watched = self._watched_tensors() if self._optimizers and not self._pipelines else {}
        self._watched, self._forward_changes = list(watched.values()), ForwardChanges(list(watched))
        for module in self._trained if not self._pipelines else ():
            module.register_forward_hook(self._after_forward)
            if watched:
                module.register_forward_pre_hook(self._before_forward)
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        self._followers = Followers(self._schedulers, self._scalers, self._optimizers)
        self._undo: Undo | None = (
            None if self._sharded or self._rounds or self._pipelines else Undo(self._parts_of_update())
        )
        self._has_late = True  # a step may be interrupted behind its update; whether it may, the first one tells
        self._was_late = False
        self._is_committing = False
        self._open_backward: int | None = None  # autograd's number of a backward that has begun and has not ended
        self._has_failed = False  # one has not, and another has begun
        self._at_update: tuple[int, int] | None = None
        self._modes: list[bool] = []  # of all modules: whether they train; as at the first commit of an epoch
        self._save()

    def _watched_tensors(self) -> dict[Tensor, str]:
        """What neither an optimizer updates nor a rank's record holds, with its name."""
        updated = {p for o in self._optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        watched: dict[Tensor, str] = {}
        for name, module in self._things.items():
            if isinstance(module, nn.Module):
                watched |= {p: f"{name}.{key}" for key, p in module.named_parameters() if p not in updated}
                if all(module is not one for one in self._trained):
                    watched |= {b: f"{name}.{key}" for key, b in module.named_buffers()}
        return {tensor: name for tensor, name in watched.items() if not tensor.is_inference()}  # which have no version

    def _keep_global_batch(self) -> GlobalBatch:
        if self._position is None:
            raise ValueError("State: batch='global' shares out the batches of a step through a sampler: give it one")
        if self._pipelines:
            raise ValueError("State: batch='global' shares batches among replicas, and a pipeline's ranks are none")
        if self._rounds:
            raise ValueError(
                "State: batch='global' is of steps that ranks make together; LocalSGD and DiLoCo have none"
            )
        followers: list[tuple[Any, str]] = [(scheduler, "step") for scheduler in self._schedulers]
        for scaler in self._scalers:
            followers += [(scaler, "unscale_"), (scaler, "step"), (scaler, "update")]
        return GlobalBatch(
            dist.get_world_size() if dist.is_initialized() else 1,
            self._position,
            averaging_modules(self._modules),
            self._optimizers,
            followers,
        )

    # -- attributes ----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        for place in ("_things", "_values"):
            values = vars(self).get(place, {})
            if name in values:
                return values[name]
        raise AttributeError(f"State has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._things:
            raise AttributeError(f"State: {name!r} stays the object that it is; load into it instead")
        else:
            self._values[name] = value
            (self._mutable.discard if isinstance(value, _IMMUTABLE) else self._mutable.add)(name)

    # -- what the loop calls -------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs from `state.epoch` up to `num_epochs`; the first may be one that was left half done.

        What the body does after its last batch (validation, a scheduler's step) belongs to the epoch, and is done again
        if ranks are lost in it. Collective: all ranks end an epoch together.
        """
        while self.epoch < num_epochs:
            if self._position is not None:
                self._position.sampler.set_epoch(self.epoch)
            yield self.epoch
            self._commit(is_step=False)

    def commit(self, *, samples: int | None = None) -> None:
        """A step is done on this rank: what comes from here on may be lost, what was before may not.

        `samples`: how many of this rank's samples were used in it, where the loop takes batches from its loader ahead
        of those that it trains on; in each commit of an epoch, or in none. Otherwise all that the loader has handed to
        the loop count as used.

        After the optimizer's step, and where no gradient is waiting for more to be added to it. What a loop does
        between this and the next batch is not done again after a loss; what it does before belongs to the step.

        Cost: where ranks wait for each other between an update and its commit (a second optimizer's backward, a loss
        that is reduced), a copy of the models and of the optimizers' states in each step, to take it back with.

        Raises:
            ValueError: `samples` are more than the loader has handed out, or not given in each commit of an epoch; or
                there is no sampler, or `batch="global"`, whose steps have the samples that they have; or LocalSGD,
                DiLoCo or a ZeroRedundancyOptimizer, of which a step may be done without its commit; or the loader has
                begun the next epoch.
        """
        if samples is not None:
            self._count_samples(samples)
        elif self._position is not None and self._position.is_counted:
            raise ValueError("State.commit(): samples= was given before in this epoch; give it in each of its commits")
        if self._global is None:
            self._commit(is_step=True)
        elif self._global.ends_step:
            self._global.end_step()
            self._commit(is_step=True)

    def _count_samples(self, samples: int) -> None:
        if self._position is None or self._global is not None:
            without = "there is no sampler in State" if self._position is None else "batch='global' counts batches"
            raise ValueError(f"State.commit(samples={samples}): {without}, so that nothing is counted. Leave it out.")
        if self._rounds or self._sharded:
            # After a loss such a step may count as done without its commit, which alone knows its samples.
            names = ", ".join(sorted({type(thing).__name__ for thing in (*self._rounds, *self._sharded)}))
            raise ValueError(
                f"State.commit(samples={samples}): there is {names} in State, whose update is not taken back after a "
                "loss, so that a step may be done of which no commit has told the samples. Leave it out, and take from "
                "the loader only the batches that the step trains on (no prefetcher)."
            )
        began = self._mark is not None and self._mark.stands_in(self._position.mark())
        if began and not self._position.is_counted:
            raise ValueError(f"State.commit(samples={samples}): this epoch's first commit had none; give it in all")
        self._position.count(samples)

    def _commit(self, *, is_step: bool) -> None:
        reached(COMMIT)
        number = self._number + 1
        runner = self._runner
        if runner is not None:
            self._require_backward()
            self._is_committing = True
            runner.before_commit(number)
            if self._stepped:
                self._learn_lateness(runner)
        self._number = number
        self._end_update()
        if is_step:
            if not self._modes:
                self._modes = [layer.training for layer in self._layers()]
            self._values["step"] += 1
            self._page.commit(self._values["step"], 0 if self._position is None else self._position.samples_per_step)
            if self._position is not None:
                self._set_mark(self._position.mark())
        else:
            self._values["epoch"] += 1
            self._modes = []
            if self._position is not None:
                self._position.end_epoch()
                self._mark = Mark(self._values["epoch"], None, 0)
        self._save()
        if runner is not None:
            runner.after_commit()

    def _set_mark(self, mark: Mark) -> None:
        last, self._mark = self._mark, mark
        if mark.used and not self._has_told_idle and last is not None and mark.stands_at(last):
            self._has_told_idle = True
            _logger.warning(
                "phalanx.elastic: step %d was committed without a sample of its own: since the step before, the loader "
                "has handed out none. If the loop takes batches ahead of those that it trains on (a prefetcher), a "
                "loss costs those that it has not used: say how many samples of this rank each step has used, "
                "state.commit(samples=len(batch)). If it does several steps with one batch, commit after the last.",
                self._values["step"] - 1,
            )

    def _save(self) -> None:
        """Note what is small, and may change before the next commit."""
        values = dict(self._values)
        for name in self._mutable:
            values[name] = pickle.dumps(values[name])
        self._saved = values
        self._followers.keep()

    def _learn_lateness(self, runner: Runner) -> None:
        """Whether a step can be interrupted between its update and its commit: then it must be possible to undo it.

        Also where the commit itself must wait for the others, as what a rank drew behind the update is not kept yet.
        """
        if self._at_update is not None and runner.count_collectives() != self._at_update:
            self._has_late = self._was_late = True
        elif not self._was_late:
            self._has_late = False

    def _end_update(self) -> None:
        self._stepped = 0
        self._forward_changes.end_step()
        self._at_update = None
        self._is_committing = False
        if self._undo is not None and self._undo.is_kept:
            self._undo.end_step(drop=not self._has_late)

    def _layers(self) -> Iterator[nn.Module]:
        below = (layer for module in self._modules for layer in module.modules())
        return itertools.chain(self._pipelines, below)  # a Pipeline's modules are those of the model alone

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the state of each object under its name, the plain values, and the data's position.

        Of the latest commit, if it is called right after one. Not collective, unless there is a Pipeline. Keys of
        models are those of the module inside a wrapper; the state of an optimizer in shards is whole, and so is that
        of a Pipeline's stages: it loads into another split, and where there is no Pipeline.
        """
        objects: dict[str, Any] = {}
        for name, thing in self._things.items():
            if isinstance(thing, DistributedSampler):
                continue
            if isinstance(thing, nn.Module):
                objects[name] = _bare(thing).state_dict()
            elif (pipe := _pipeline_of(thing)) is not None:
                objects[name] = pipe.optimizer_state_dict(thing)
            elif isinstance(thing, ZeroRedundancyOptimizer):
                objects[name] = _whole_state(thing)
            else:
                objects[name] = thing.state_dict()
        whole = {"objects": objects, "values": dict(self._values), "position": self.data_position()}
        return whole if self._global is None else {**whole, "micro_batches": self._global.num_micro_batches}

    def data_position(self) -> dict[str, Any] | None:
        """Where the data stands at the latest commit, in the form of the sampler's `state_dict`; None without one."""
        if self._position is None:
            return None
        mark = self._mark or self._position.mark()
        return {**self._position.sampler.state_dict(), "epoch": mark.epoch, "consumed": mark.consumed}

    def load_data_position(self, position: dict[str, Any] | None) -> None:
        """Go on there, before `phalanx.elastic.run`: `load_state_dict` does, and who keeps the rest by other means."""
        if self._position is not None and position is not None:
            self._position.sampler.load_state_dict(position)
            self._mark = Mark(position["epoch"], None, position["consumed"])
            self._save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, on every rank, before `phalanx.elastic.run`; with any number of ranks.

        Raises:
            ValueError: it is the state of other objects, or of an optimizer of other parameters.
        """
        mine = {name for name, thing in self._things.items() if not isinstance(thing, DistributedSampler)}
        if differing := mine ^ state_dict["objects"].keys():
            raise ValueError(f"State.load_state_dict: {min(differing)!r} is in one of checkpoint and state only")
        for name, saved in state_dict["objects"].items():
            thing = self._things[name]
            if (pipe := _pipeline_of(thing)) is not None:
                pipe.load_optimizer_state_dict(thing, saved)
            else:
                (_bare(thing) if isinstance(thing, nn.Module) else thing).load_state_dict(saved)
        for name, value in state_dict["values"].items():
            setattr(self, name, value)
        self.load_data_position(state_dict["position"])
        if self._global is not None and "micro_batches" in state_dict:
            self._global.num_micro_batches = state_dict["micro_batches"]
            if dist.is_initialized():
                self._global.spread(dist.get_rank(), dist.get_world_size())
        self._save()

    # -- hooks ---------------------------------------------------------------------------------------------------

    @untraced
    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self._runner is not None and module.training and torch.is_grad_enabled():
            self._forward_changes.begin_step()

    def _before_step(self, *_: Any) -> None:
        self._require_backward()
        if self._stepped == 0:
            self._forward_changes.learn()
        if self._at_update is None and self._runner is not None and self._undo is not None:
            if self._has_late:
                self._undo.keep()
            self._at_update = self._runner.count_collectives()
        self._stepped = 1

    def _after_step(self, *_: Any) -> None:
        self._stepped = 2

    @untraced
    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._runner is None or not module.training or not torch.is_grad_enabled():
            return
        call_before_backward(output, self._before_backward)

    @untraced
    def _before_backward(self, *_: Any) -> None:
        if self._runner is None:
            return
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._open_backward):
            self._has_failed |= self._open_backward is not None
            self._open_backward = task
            _after_backward(lambda: _after_backward(self._end_backward))  # behind those of wrappers, which wait there
        self._runner.before_backward()

    def _end_backward(self) -> None:
        self._open_backward = None

    def _require_backward(self) -> None:
        """A loop may have swallowed the error by which it was to hear of a loss; what it has done since does not count.

        A backward that ended by an error of the loop's own, on all ranks, is the loop's business.
        """
        if self._open_backward in (None, torch._C._current_graph_task_id()) and not self._has_failed:
            return
        if self._runner is not None and not self._rounds:
            self._runner.require_group()
        self._open_backward, self._has_failed = None, False

    def _on_iterator(self, would_last: bool) -> None:
        """A loader that goes on inside an epoch has drawn a seed for its workers, as an undisturbed one has not; nor
        has one whose workers last, at the beginning of any epoch but the job's first.
        """
        again, self._random_again = self._random_again, None
        if again is not None and (would_last or (self._mark is not None and self._mark.is_inside)):
            again()

    # -- what the runner asks ------------------------------------------------------------------------------------

    def _learn_update(self) -> None:
        """After an error: a sharded update that was interrupted has been undone, or was completed by the others."""
        if self._stepped == 1 and self._rounds:  # a round is held behind the update, and it is the round that failed
            self._stepped = 2
        if self._stepped == 1 and len(self._sharded) == len(self._optimizers):
            updated = {one.has_updated for one in self._sharded}
            if len(updated) == 1:
                self._stepped = 2 if updated.pop() else 0
        if self._stepped and self._undo is not None and self._undo.is_kept:
            self._undo.give_back()
            self._stepped = 0
            self._forward_changes.give_back()
        if not self._stepped:
            self._followers.give_back()
            for number in self._forward_changes.give_back()[:1]:
                _logger.warning(
                    "phalanx.elastic: %s was changed before the update for the first time in step %d, which is done "
                    "again: on this rank it has changed twice. From the next step on it is kept.",
                    self._watched[number],
                    self._values["step"],
                )

    def _count_as_done(self, number: int) -> None:
        """The update is made, and only the commit is missing."""
        if not self._rounds and self._stepped == 2 and not self._is_committing:
            self._has_late = self._was_late = True
            _logger.warning(
                "phalanx.elastic: the loss came between update and commit of step %d. The step counts, but what the "
                "loop does there after the collective that failed (a scheduler's step, say) was not done for it. %s",
                self._values["step"],
                "Let nothing come between the two that waits for other ranks: optimizers in shards cannot take it back."
                if self._undo is None
                else "From now on such a step is taken back.",
            )
        self._number = number
        self._end_update()
        self._values["step"] += 1
        if self._position is not None:
            self._mark = self._position.mark()
        self._save()

    @property
    def _is_whole(self) -> bool:
        """Whether all that no record holds is as it was at the latest commit."""
        return self._stepped == 0

    def _roll_back_values(self) -> None:
        for name, value in self._saved.items():
            self._values[name] = pickle.loads(value) if name in self._mutable else value

    def _parts(self) -> list[Part]:
        """What is the same on every rank, in the order in which it is handed over."""
        parts: list[Part] = []
        shared = frozenset(id(p) for o in self._sharded for group in o.param_groups for p in group["params"])
        for thing in self._things.values():
            if isinstance(thing, nn.Module):
                parts.append(ModulePart(thing, buffers=all(thing is not m for m in self._trained), without=shared))
            elif thing in self._sharded:
                continue  # after all others, to all ranks
            elif isinstance(thing, Optimizer):
                parts.append(OptimizerPart(thing))
            elif not isinstance(thing, DistributedSampler):
                parts.append(StatefulPart(thing))
        return [*parts, ValuePart(self._get_progress, self._put_progress)]

    def _parts_of_update(self) -> list[Part]:
        """What changes between an update and its commit, in a loop that keeps an average of the model, too."""
        return [part for part in self._parts() if isinstance(part, (ModulePart, OptimizerPart))]

    def _own_parts(self) -> list[Part]:
        """What each rank has for itself where the model is in stages: all of it, so that a rank is what it has left."""
        parts: list[Part] = []
        for thing in self._things.values():
            if isinstance(thing, nn.Module):
                parts.append(ModulePart(thing, buffers=True))
            elif thing in self._sharded:
                parts.append(SlicesPart(thing))
            elif isinstance(thing, Optimizer):
                parts.append(OptimizerPart(thing))
            elif not isinstance(thing, DistributedSampler):
                parts.append(StatefulPart(thing))
        return [*parts, ValuePart(self._get_progress, self._put_progress)]

    def _get_progress(self) -> Any:
        mark = self._mark
        where = None if mark is None else (mark.epoch, mark.consumed)
        return {
            "number": self._number,
            "values": self._saved,
            "mutable": sorted(self._mutable),
            "where": where,
            "modes": self._modes,
            "late": (self._has_late, self._was_late),
            "micro_batches": None if self._global is None else self._global.num_micro_batches,
        }

    def _put_progress(self, progress: Any) -> None:
        self._number = progress["number"]
        self._mutable.clear()
        self._mutable.update(progress["mutable"])
        self._saved = progress["values"]
        self._modes = progress["modes"]
        self._has_late, self._was_late = progress["late"]
        if self._global is not None:
            self._global.num_micro_batches = progress["micro_batches"]
        where = progress["where"]
        self._mark = None if where is None else Mark(where[0], None, where[1])

    def _settle(self, rank: int, world_size: int) -> None:
        """After the state has arrived, or was there: everything is as at the latest commit."""
        self._end_update()
        self._open_backward, self._has_failed = None, False
        self._roll_back_values()
        for layer, trains in zip(self._layers(), self._modes, strict=False):  # the loss may have come in a validation
            layer.training = trains
        for optimizer in self._optimizers if self._values["step"] else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler's question to who has just come
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        if self._position is not None:
            if self._global is not None:
                self._global.spread(rank, world_size)
            elif not self._pipelines:  # their ranks are no replicas, and read as the sampler was told
                self._position.sampler.regroup(world_size, rank)
            if self._mark is not None:
                self._position.go_to(self._mark.epoch, self._mark.consumed)
                self._mark = Mark(self._mark.epoch, None, self._mark.consumed)
        self._save()


def _after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward at hand has ended, if it ends well."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _bare(module: nn.Module) -> nn.Module:
    """The module inside a wrapper that averages gradients."""
    wrapped = isinstance(module, (DistributedDataParallel, TorchDistributedDataParallel))
    return cast(nn.Module, module.module) if wrapped else module


def _pipeline_of(thing: Any) -> Pipeline | None:
    """That whose parameters an optimizer updates."""
    owner = owner_of(thing) if isinstance(thing, Optimizer) else None
    return owner if isinstance(owner, Pipeline) else None


def _hides_pipeline(module: nn.Module) -> bool:
    if isinstance(module, Pipeline):
        return False
    children = [child for child in module._modules.values() if child is not None]
    return any(isinstance(child, Pipeline) or _hides_pipeline(child) for child in children)


def _whole_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    numbers = {p: number for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": optimizer.kept_state() or {}, "param_groups": groups}


def _is_kept_by_state(thing: Any) -> bool:
    """Whether it is an object with a state of its own, and not a plain value."""
    if isinstance(thing, Sampler) and not isinstance(thing, DistributedSampler):
        raise TypeError(
            f"State: {type(thing).__name__} cannot say where it stands, or go on from there. Use "
            "phalanx.DistributedSampler, which takes the same arguments."
        )
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
