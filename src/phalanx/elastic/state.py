"""`State` holds what training needs to go on where another rank stood; the loop commits it."""

from __future__ import annotations

import marshal
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._base.log import get_logger
from phalanx._comm.backend import rendezvous
from phalanx._comm.diagnostics.progress_page import open_page
from phalanx.elastic.buffers import Buffers
from phalanx.elastic.frozen import Frozen, freeze, thaw
from phalanx.elastic.hand_over import Part, ValuePart
from phalanx.elastic.objects import Objects, has_state
from phalanx.elastic.points import COMMIT, reached
from phalanx.elastic.position import DataPosition, Mark
from phalanx.elastic.rebind import averaging_modules
from phalanx.elastic.step import StepTracker

_logger = get_logger(__name__)


class LatestCommit:
    """A loss takes this rank back to this commit: its number, the epoch and step after it, and the small state.

    The ends of epochs are commits as well, so that numbers run ahead of steps.
    """

    __slots__ = ("epoch", "number", "small", "step")

    def __init__(self) -> None:
        self.number = self.epoch = self.step = 0
        self.small = NO_VALUES


class State:
    """Hold everything that a rank must have to go on where another one stood.

        state = phalanx.elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, best=0.0)

    Each argument is an attribute, under its name. Modules, optimizers, schedulers, gradient scalers, a
    `phalanx.DistributedSampler` and whatever else has `state_dict` and `load_state_dict` are known by their kind; all
    others, `epoch=0` above all, are plain values that go back to what they were at the latest commit.

    The sampler's position is that of the loader; a loop that takes batches ahead of those it trains on (a prefetcher of
    its own) says how many samples a step has used: `commit(samples=n)`.

    `commit()` says that a step is done. Without `phalanx.elastic.run` it only counts.

    Raises:
        TypeError: a sampler that cannot say where it stands.
        ValueError: a name that is taken, or several samplers.
    """

    _things: dict[str, Any]
    _values: dict[str, Any]

    def __init__(self, **things: Any) -> None:
        reserved = [name for name in things if name.startswith("_") or hasattr(type(self), name)]
        if reserved:
            raise ValueError(f"State: {reserved[0]!r} is a name of its own: give the argument another")
        object.__setattr__(self, "_values", {"epoch": 0, "step": 0})
        object.__setattr__(self, "_things", {})
        kept: dict[str, Any] = self._things
        for name, thing in things.items():
            if has_state(thing):
                kept[name] = thing
            else:
                setattr(self, name, thing)
        self._page = open_page(rendezvous.agent_address())  # `phalanx top` reads here how far this rank is
        self._latest = LatestCommit()
        self._position: DataPosition | None = None
        self._mark: Mark | None = None
        self._has_told_idle = False
        self._random_again: Callable[[], None] | None = None
        self._is_back = False  # at the latest commit, and no loader has begun a pass since
        # by loader whose workers last: after which commit it has drawn the seed for them
        self._drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._objects = Objects(kept)
        self._small = SmallState(self._objects, self._values)
        if self._objects.sampler is not None:
            self._position = DataPosition(self._objects.sampler, self._on_iterator)
        self._step = StepTracker(self._objects, None if self._position is None else self._position.mark)
        # what no part holds of the layers and wrappers, as at the latest commit
        self._switches = Switches(self._objects)
        self._save()

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

    # -- what the loop calls -------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs from `state.epoch` up to `num_epochs`; the first may be one that was left half done.

        What the body does after its last batch (validation, a scheduler's step) belongs to the epoch, and is done again
        if ranks are lost in it; so is what it does before its first batch (`rate *= 0.5`): compute that from the epoch.
        Collective: all ranks end an epoch together, but for those that train apart (LocalSGD).
        """
        while self.epoch < num_epochs:
            if self._position is not None:
                self._position.sampler.set_epoch(self.epoch)
            yield self.epoch
            self._commit(is_step=False)

    def commit(self, *, samples: int | None = None) -> None:
        """Commit a step that is done on this rank: what comes from here on may be lost, what was before may not.

        `samples` is how many of this rank's samples were used in the step, for a loop that takes batches from its
        loader ahead of those that it trains on; give it in each commit of an epoch, or in none. Otherwise all samples
        that the loader has handed to the loop count as used.

        Call it after the optimizer's step, while no gradient is waiting for more to be added to it. What a loop does
        between this and the next batch is not done again after a loss; what it does before belongs to the step.

        Cost: where ranks wait for each other between an update and its commit (a second optimizer's backward, a loss
        that is reduced), a copy of the models and of the optimizers' states in each step, to take it back with.

        Raises:
            ValueError: `samples` are more than the loader has handed out, or not given in each commit of an epoch; or
                there is no sampler; or LocalSGD, DiLoCo or a ZeroRedundancyOptimizer, of which a step may be done
                without its commit; or the loader has begun the next epoch.
        """
        if samples is not None:
            self._count_samples(samples)
        elif self._position is not None and self._position.is_counted:
            raise ValueError("State.commit(): samples= was given before in this epoch; give it in each of its commits")
        self._commit(is_step=True)

    def _count_samples(self, samples: int) -> None:
        if self._position is None:
            raise ValueError(
                f"State.commit(samples={samples}): there is no sampler in State, so nothing is counted. Leave it out."
            )
        if self._objects.rounds or self._objects.sharded:
            # After a loss such a step may count as done without its commit, which alone knows its samples.
            names = ", ".join(
                sorted({type(thing).__name__ for thing in (*self._objects.rounds, *self._objects.sharded)})
            )
            raise ValueError(
                f"State.commit(samples={samples}): there is {names} in State, whose updates are not always taken back "
                "after a loss, so that a step may be done of which no commit has told the samples. Leave it out, and "
                "take from the loader only the batches that the step trains on (no prefetcher)."
            )
        began = self._mark is not None and self._mark.stands_in(self._position.mark())
        if began and not self._position.is_counted:
            raise ValueError(f"State.commit(samples={samples}): this epoch's first commit had none; give it in all")
        self._position.count(samples)

    def _commit(self, *, is_step: bool) -> None:
        reached(COMMIT)
        latest, values, step = self._latest, self._values, self._step
        runner = step.runner
        number = latest.number + 1
        if runner is not None:
            small = self._small.capture(values)
            step.begin_commit(number, small)
            latest.small = small
        latest.number = number
        step.end()
        if is_step:
            self._switches.keep()
            values["step"] += 1
            self._page.commit(values["step"], 0 if self._position is None else self._advance(self._position))
        else:
            values["epoch"] += 1
            self._switches.keep_all()
            if self._position is not None:
                self._position.end_epoch()
                self._mark = Mark(values["epoch"], None, 0)
        latest.epoch, latest.step = values["epoch"], values["step"]
        if runner is not None:
            step.schedulers_and_scalers.keep(is_step=is_step)
            runner.after_commit()

    def _advance(self, position: DataPosition) -> int:
        """Note the position in the data; return how many samples of this rank the step has used."""
        last, mark = self._mark, position.mark()
        self._mark = mark
        if mark.used and not self._has_told_idle and last is not None and mark.stands_at(last):
            self._has_told_idle = True
            _logger.warning(
                "phalanx.elastic: step %d was committed without a sample of its own: since the step before, the loader "
                "has handed out none. If the loop takes batches ahead of those that it trains on (a prefetcher), a "
                "loss costs those that it has not used: say how many samples of this rank each step has used, "
                "state.commit(samples=len(batch)). If it does several steps with one batch, commit after the last.",
                self._values["step"] - 1,
            )
        return position.samples_between(last, mark)

    def _save(self) -> None:
        """Save what is small, and may change before the next commit."""
        latest = self._latest
        latest.small = self._small.capture(self._values)
        latest.epoch, latest.step = self._values["epoch"], self._values["step"]
        self._step.schedulers_and_scalers.keep()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the state of each object by name, the plain values, and the data's position.

        It is that of the latest commit, if this is called right after one. A rank may call it alone, unless there is a
        Pipeline. Keys of models are those of the module inside a wrapper; the state of an optimizer in shards is whole,
        and so is that of a Pipeline's stages: it loads into another split, and into a model without a Pipeline.
        """
        whole = {
            "objects": self._objects.state_dict(),
            "values": dict(self._values),
            "position": self.data_position(),
        }
        return whole

    def data_position(self) -> dict[str, Any] | None:
        """Return the data's position at the latest commit, in the form of the sampler's `state_dict`, or None."""
        if self._position is None:
            return None
        mark = self._mark or self._position.mark()
        return {**self._position.sampler.state_dict(), "epoch": mark.epoch, "consumed": mark.consumed}

    def load_data_position(self, position: dict[str, Any] | None) -> None:
        """Set the data's position, before `phalanx.elastic.run`. `load_state_dict` does so; else call it."""
        if self._position is not None and position is not None:
            self._position.sampler.load_state_dict(position)
            self._mark = Mark(position["epoch"], None, position["consumed"])
            self._save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, on every rank, before `phalanx.elastic.run`; with any number of ranks.

        Raises:
            ValueError: it is the state of other objects, or of an optimizer of other parameters.
        """
        self._objects.load_state_dict(state_dict["objects"])
        for name, value in state_dict["values"].items():
            setattr(self, name, value)
        self.load_data_position(state_dict["position"])
        self._save()

    def _go_on_with(self, set_random: Callable[[], None]) -> None:
        """Note that the random states, which `set_random` sets again, are those of the latest commit."""
        self._is_back = True
        if self._mark is not None:  # also on a rank that has just come: a loss in its first step takes it back to here
            self._random_again = set_random

    def _on_iterator(self, loader: Any, is_new: bool) -> None:
        """Give the random states what an undisturbed loader would have drawn for its workers, and nothing else.

        A loader that goes on inside an epoch has drawn a seed, as an undisturbed one has not; nor has one whose workers
        last (`persistent_workers`), at the beginning of any epoch but the job's first. But where workers have lasted
        over the loss, and their seed was drawn after the commit to which all went back, it is drawn once more.
        """
        again, self._random_again = self._random_again, None
        is_back, self._is_back = self._is_back, False
        lasts = bool(getattr(loader, "persistent_workers", False))
        if again is not None and ((is_new and lasts) or (self._mark is not None and self._mark.is_inside)):
            again()
        elif is_new and lasts:
            self._drawn[loader] = self._latest.number
        elif is_back and self._drawn.get(loader) == self._latest.number and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()  # as torch's loader does for its iterator

    # -- what the runner asks ------------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """Begin to count commits anew: what an earlier `elastic.run` of this State has learned does not hold."""
        if self._latest.number and self._position is not None:
            self._mark = self._position.next_pass()
        self._latest.number, self._random_again = 0, None
        self._switches.keep_all()
        self._drawn.clear()
        self._is_back = False
        self._step.begin_run()
        self._save()

    def _count_as_done(self, number: int) -> None:
        """Note that the update is made, and that only the commit is missing.

        A batch that the loop has taken behind the update is not used, if the commit was to have another one.
        """
        mark = None if self._step.is_committing else self._step.mark
        self._step.count(self._values["step"])
        self._latest.number = number
        self._values["step"] += 1
        self._switches.keep()
        if self._position is not None:
            self._mark = mark or self._position.mark()
        self._save()

    def _roll_back_values(self) -> None:
        latest = self._latest
        self._small.restore(latest.small)
        self._values["epoch"], self._values["step"] = latest.epoch, latest.step

    @property
    def _form(self) -> str:
        """Return the names and kinds of the objects: they must be the same on all ranks."""
        return ", ".join(f"{name}={type(thing).__name__}" for name, thing in self._things.items())

    def _parts(self) -> list[Part]:
        """Return what is the same on every rank, in the order in which it is handed over."""
        return [*self._objects.parts(), ValuePart(self._get_progress, self._put_progress)]

    def _get_progress(self) -> Any:
        mark = self._mark
        where = None if mark is None else (mark.epoch, mark.consumed)
        return {
            "number": self._latest.number,
            "small": tuple(self._latest.small),
            "position": (self._latest.epoch, self._latest.step),
            "where": where,
            "switches": self._switches.kept,
            "late": self._step.lateness,
        }

    def _put_progress(self, progress: Any) -> None:
        latest = self._latest
        latest.number = progress["number"]
        latest.small = Frozen(*progress["small"])
        latest.epoch, latest.step = progress["position"]
        self._switches.kept = progress["switches"]
        self._step.lateness = progress["late"]
        where = progress["where"]
        self._mark = None if where is None else Mark(where[0], None, where[1])

    def _settle(self, rank: int, world_size: int) -> None:
        """Set everything to the latest commit, after the state has arrived or was there."""
        self._step.end()
        self._step.forget_backward()
        self._roll_back_values()
        self._switches.give_back()
        for optimizer in self._objects.optimizers if self._values["step"] else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler's question to who has just come
        for scaler in self._objects.scalers:
            scaler._per_optimizer_states.clear()
        for module in self._objects.modules:
            for parameter in module.parameters():
                parameter.grad = None
        if self._position is not None:
            self._position.sampler.regroup(world_size, rank)
            if self._mark is not None:
                self._position.go_to(self._mark.epoch, self._mark.consumed)
                self._mark = Mark(self._mark.epoch, None, self._mark.consumed)
        self._save()


# Take and give back the small state of a rank: what it holds beside parameters and optimizers, and for itself.
#
#     values            what State was given as plain values              {"best": 0.25}
#     others            states of small objects with `state_dict`          a metric
#     extra             what layers give as `get_extra_state`              scales of float8
#     attributes        numbers and generators that layers of the script's own classes keep
#     buffers           of models that no optimizer trains                 an average's
#
# It is taken at each commit, and given back after a loss: the rank's own where ranks differ.

_POSITION = ("epoch", "step")  # they go with the number of the commit
_PLAIN = b"values:"  # this prefix, and numbers in the form that Python reads and writes fastest; no pickle begins so
_NUMBERS = frozenset((int, float, bool, complex, str, type(None)))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

NO_VALUES = Frozen(_PLAIN + marshal.dumps({}, 2), [])
"""The small state of a rank that has nothing of its own."""


class SmallState:
    """`SmallState` captures and restores the small state of one rank.

    Cost: microseconds in each commit, and what the script's `get_extra_state` takes.
    """

    def __init__(self, objects: Objects, values: dict[str, Any]) -> None:
        self._objects, self._values = objects, values
        layers = objects.named_layers()
        trained = {id(layer) for module in objects.trained for layer in module.modules()}
        self._buffers = Buffers({key: layer for key, layer in layers.items() if id(layer) not in trained})
        plain = nn.Module.get_extra_state
        self._extra = {key: layer for key, layer in layers.items() if type(layer).get_extra_state is not plain}
        self._users = {key: layer for key, layer in layers.items() if _is_users(type(layer))}
        averages = any(id(layer) not in trained for layer in layers.values())
        self._is_plain = not (objects.small or self._extra or self._users or averages)  # there is nothing but values

    def capture(self, values: Mapping[str, Any]) -> Frozen:
        """Return the current state, in a form that does not change; of `values`, those that the script has set.

        Raises:
            TypeError: a value, or the state of an object, cannot be pickled.
        """
        if self._is_plain and len(values) == len(_POSITION):
            return NO_VALUES
        own = {name: value for name, value in values.items() if name not in _POSITION}
        if self._is_plain and _NUMBERS.issuperset(map(type, own.values())):
            return Frozen(_PLAIN + marshal.dumps(own, 2), [])  # the bytes of later versions depend on references
        content: dict[str, Any] = {"values": {name: _shown(value) for name, value in own.items()}}
        if self._objects.small:
            content["others"] = {name: thing.state_dict() for name, thing in self._objects.small.items()}
        if self._extra:
            content["extra"] = {key: layer.get_extra_state() for key, layer in self._extra.items()}
        if self._users:
            content["attributes"] = {key: _numbers_of(layer) for key, layer in self._users.items()}
        try:
            frozen = freeze(content, self._tensor_names)
        except Exception as error:
            raise TypeError(f"State: {_find_unkept(content)} cannot be kept: {error}") from error
        self._buffers.look()
        if not self._buffers.tensors and not frozen.tensors:
            return frozen
        whole = pickle.dumps((frozen.data, len(frozen.tensors), self._buffers.plan))
        return Frozen(whole, [t.detach().clone() for t in (*frozen.tensors, *self._buffers.tensors)])

    def restore(self, kept: Frozen) -> None:
        """Restore everything to what it was when `kept` was captured, on this rank or another."""
        if kept.data.startswith(_PLAIN):
            self._values.update(marshal.loads(kept.data[len(_PLAIN) :]))
            return
        frozen, plan = kept, b""
        if kept.tensors:
            data, count, plan = pickle.loads(kept.data)
            frozen = Frozen(data, kept.tensors[:count])
            self._buffers.look()
            self._buffers.restore(plan, kept.tensors[count:])
        content = thaw(frozen, self._tensors_by_name)
        for name, value in content["values"].items():
            _put(self._values, name, value)
        for name, state in content.get("others", {}).items():
            self._objects.small[name].load_state_dict(state)
        for key, state in content.get("extra", {}).items():
            self._extra[key].set_extra_state(state)
        for key, numbers in content.get("attributes", {}).items():
            for name, value in numbers.items():
                _put(vars(self._users[key]), name, value)

    def _tensors_by_name(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for thing, module in self._objects.named_modules.items():
            named |= {f"{thing}.{name}": tensor for name, tensor in module.named_parameters()}
            named |= {f"{thing}.{name}": tensor for name, tensor in module.named_buffers()}
        return named

    def _tensor_names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._tensors_by_name().items()}


class _GeneratorState(tuple[bytes]):
    """The state of a generator; restoring it keeps the same generator object."""


def _shown(value: Any) -> Any:
    return _GeneratorState((value.get_state().numpy().tobytes(),)) if isinstance(value, torch.Generator) else value


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, _GeneratorState):
        place[name].set_state(torch.frombuffer(bytearray(value[0]), dtype=torch.uint8))
    else:
        place[name] = value


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "phalanx")


def _numbers_of(layer: nn.Module) -> dict[str, Any]:
    return {
        name: _shown(value)
        for name, value in vars(layer).items()
        if type(value) in _KEPT and name not in _OF_EVERY_MODULE
    }


_KEPT = frozenset((*_NUMBERS, torch.Generator))


def _find_unkept(content: Mapping[str, Any]) -> str:
    for kind, items in content.items():
        for name, value in items.items():
            try:
                freeze(value)
            except Exception:
                return f"{name!r}" if kind == "values" else f"the state of {name!r}"
    return "a value"


class Switches:
    """`Switches` keeps those of all modules in `objects`, which a loss may find in a validation, or in an accumulation.

    Cost: a look at each layer in each commit.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._wrappers: list[Any] = list(averaging_modules(objects.modules))
        self._layers: list[nn.Module] = []
        self.kept: tuple[list[bool], list[bool]] = [], []
        """Whether each layer trains, and whether each wrapper's next forward begins with rank 0's buffers."""

    def keep_all(self) -> None:
        """Keep them as they are at the end of an epoch, after which the loop sets them for the next one."""
        self._layers = list(self._objects.layers())
        self.kept = [layer.training for layer in self._layers], self._broadcasts()

    def keep(self) -> None:
        """Keep them as they are at the commit of a step.

        A loop may commit in evaluation, and train again behind the commit, which is not done again after a loss. So the
        layers' are those of the latest commit at which all models that have an optimizer trained.
        """
        modes = self.kept[0]
        if all(module.training for module in self._objects.trained):
            modes = [layer.training for layer in self._layers]
        self.kept = modes, self._broadcasts()

    def _broadcasts(self) -> list[bool]:
        return [wrapper.require_forward_param_sync for wrapper in self._wrappers]

    def give_back(self) -> None:
        """Set all modules as they were kept."""
        modes, broadcasts = self.kept
        self._layers = list(self._objects.layers())
        for layer, trains in zip(self._layers, modes, strict=False):
            layer.training = trains
        for wrapper, is_due in zip(self._wrappers, broadcasts, strict=True):
            wrapper.require_forward_param_sync = is_due
