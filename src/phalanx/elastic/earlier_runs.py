"""Keep what each earlier `elastic.run` of a script has left, for a replacement whose script begins from the top.

    others           run 1 ─▶ script ─▶ run 2, step 7: a rank is lost ─▶ meeting ───────────▶ meeting ─▶ run 2, step 7
    the replacement          script ─▶ run 1: it is passed over, with what it has left ─▶ script ─▶ run 2, step 7

In the first meeting the replacement receives what the objects of that run's State hold, the plain values, and what the
function has returned. It leaves the group again and goes on in a rehearsal to its next `elastic.run`.

Objects of an earlier State are held by weak references: what the script lets go of is freed. A copy is made only of
what a later State has again, as it was when that later run began, since training changes it. What the function has
returned is pickled at once, and is not held.

Runs are told apart by their names, of which none may come twice. The runs of a replacement must be those of the others,
from the first on, or the job ends: what it had trained or passed over might be something else.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.backend.skeleton import join, split
from phalanx.data import DistributedSampler
from phalanx.elastic import generator_states
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.generations import JobEndedError
from phalanx.elastic.generator_states import GeneratorStates
from phalanx.elastic.hand_over import OptimizerPart, Part, StatefulPart, hand_over
from phalanx.elastic.state import State
from phalanx.log import get_logger
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.partition.owners import owner_of
from phalanx.pipeline import Pipeline

_logger = get_logger(__name__)
_LARGEST = 1 << 20  # what a rank alone has is told to all ranks up to this size
_earlier: list[EarlierRun] = []
_begun: set[str] = set()  # the names of all runs that have begun in this process, also of those that have failed
_is_repeated = False  # a name has come a second time: no later run is kept


class TensorsPart:
    """`TensorsPart` hands over a module's parameters and buffers by name, of those that the giver still has."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._name, self._tensors = name, tensors

    def show(self) -> Any:
        """Return the tensors themselves."""
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def take(self, value: Any) -> None:
        """Copy what was received.

        Raises:
            JobEndedError: this rank's module has no such tensor, or one of another shape.
        """
        for name, theirs in value.items():
            mine = self._tensors.get(name)
            if mine is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise JobEndedError(
                    f"{name!r} of {self._name!r}, which an earlier elastic.run has trained, is {theirs.dtype} of shape "
                    f"{list(theirs.shape)} on the other ranks, and not on this one. Make the module before its "
                    "elastic.State as it is to be"
                )
            if mine.data_ptr() != theirs.data_ptr():
                mine.data.copy_(theirs)


class GivenPart:
    """`GivenPart` hands over a value that is not the state of an object of this rank."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def show(self) -> Any:
        """Return the value."""
        return self._value

    def take(self, value: Any) -> None:
        """Do nothing: only a rank that gives has one."""


@dataclass
class _Own:
    """An `_Own` is what one rank has of a run for itself; `result` is pickled, with `why` where that failed."""

    random: tuple[bytes, bytes, bytes, bytes]
    small: Frozen
    position: tuple[int, int]
    progress: Any
    sampler: dict[str, Any] | None
    buffers: dict[str, dict[str, Tensor]]
    modes: dict[str, dict[str, bool]]
    trains: dict[str, dict[str, bool]]
    result: bytes = b""
    why: str = ""


class _Copy:
    """A `_Copy` has the tensors of a value in the memory of the CPU."""

    def __init__(self, value: Any) -> None:
        tensors: list[Tensor] = []
        self._structure = split(value, tensors)
        self._places = [tensor.device for tensor in tensors]
        self._tensors = [tensor.to("cpu", copy=True) for tensor in tensors]

    def show(self) -> Any:
        """Return the value, with tensors where they were."""
        pairs = zip(self._tensors, self._places, strict=True)
        return join(self._structure, [tensor.to(device) for tensor, device in pairs])


@dataclass
class EarlierRun:
    """An `EarlierRun` is an `elastic.run` that has returned on all ranks. `name` tells it from other runs."""

    name: str
    own: bytes = b""
    """It is what this rank has for itself, as pickled `_Own`."""
    told: tuple[bytes, ...] = ()
    """It is what each rank has for itself, by rank, where it is small; empty if the ranks have not told each other."""
    state: Callable[[], Any] = lambda: None
    things: dict[str, Callable[[], Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Callable[[], Tensor | None]]] = field(default_factory=dict)
    copies: dict[str, _Copy] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, state: State, result: Any) -> EarlierRun:
        """Return what a run of `state` leaves, which has just returned `result`."""
        run = cls(name)
        run._refer_to(state)
        small = state._latest.small
        with contextlib.suppress(TypeError):  # a value that it was given behind its last commit cannot be pickled
            small = state._small.capture(state._values)
        sampler, modules = state._objects.sampler, state._objects.named_modules
        own = _Own(
            GeneratorStates().capture(),
            small,
            (state._values["epoch"], state._values["step"]),
            state._get_progress(),
            None if sampler is None else sampler.state_dict(),
            {
                name: {key: one.detach().to("cpu", copy=True) for key, one in run._living(name, buffers=True).items()}
                for name in run.tensors
            },
            {name: {key: layer.training for key, layer in one.named_modules()} for name, one in modules.items()},
            {name: {key: p.requires_grad for key, p in one.named_parameters()} for name, one in modules.items()},
        )
        try:
            own.result = _pickled(result, run._known())
        except Exception as error:
            own.why = f"{type(error).__name__}: {error}"
        run.own = pickle.dumps(own)
        return run

    def _refer_to(self, state: State) -> None:
        self.state = _refer(state)
        for name, thing in state._things.items():
            self.things[name] = _refer(thing)
            if isinstance(thing, nn.Module):
                self.tensors[name] = {key: _refer(tensor) for key, tensor in _tensors_of(thing).items()}

    # -- when the next run begins --------------------------------------------------------------------------------

    def keep_for(self, later: State) -> None:
        """Copy what `later` has again; no other rank is asked."""
        again = {id(thing) for thing in later._things.values()}
        again |= {id(tensor) for module in later._objects.modules for tensor in _tensors_of(module).values()}
        for name in self.things.keys() - self.copies.keys():
            part = self._part(name)
            if part is not None and (
                id(self.things[name]()) in again
                or any(id(tensor()) in again for tensor in self.tensors.get(name, {}).values())
            ):
                self.copies[name] = _Copy(part.show())

    def tell(self, group: Any) -> None:
        """Have each rank know what every rank has for itself of this run. All ranks call it."""
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, self.own if len(self.own) <= _LARGEST else b"", group=group)
        self.told = tuple(told)

    def _restore_own(self, state: State) -> None:
        own: _Own = pickle.loads(self.own)
        for name, buffers in own.buffers.items():
            mine = self._living(name, buffers=True)
            for key in buffers.keys() & mine.keys():
                mine[key].data.copy_(buffers[key])
        for name, module in state._objects.named_modules.items():
            for key, layer in module.named_modules():
                layer.training = own.modes[name].get(key, layer.training)
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(own.trains[name].get(key, parameter.requires_grad))
        state._put_progress(own.progress)
        state._small.restore(own.small)
        state._values["epoch"], state._values["step"] = own.position
        if own.sampler is not None and state._objects.sampler is not None:
            state._objects.sampler.load_state_dict(own.sampler)
        generator_states.restore(own.random)

    def _part(self, name: str) -> Part | None:
        """Return the part that hands over the thing of that name; None if nothing is left of it, or it is not handed
        over.
        """
        thing = self.things[name]()
        if name in self.tensors:
            tensors = self._living(name)
            return TensorsPart(name, tensors) if tensors and not isinstance(thing, Pipeline) else None
        if thing is None or isinstance(thing, (DistributedSampler, ZeroRedundancyOptimizer)):
            return None
        if isinstance(thing, Optimizer):
            models = {one: self.things[one]() for one in self.tensors}
            if isinstance(owner_of(thing), Pipeline) or any(model is None for model in models.values()):
                return None
            named = {id(p) for model in models.values() for p in model.parameters()}
            is_named = all(id(p) in named for group in thing.param_groups for p in group["params"])
            return OptimizerPart(thing, models) if is_named else None
        return StatefulPart(thing)

    def _living(self, name: str, *, buffers: bool = False) -> dict[str, Tensor]:
        living = {key: tensor for key, ask in self.tensors[name].items() if (tensor := ask()) is not None}
        return {key: one for key, one in living.items() if not (buffers and isinstance(one, nn.Parameter))}

    def _known(self) -> dict[str, Any]:
        """Return the objects of the State, and their modules and tensors, by a name that all ranks have for them."""
        known: dict[str, Any] = {"": self.state()}
        for name, ask in self.things.items():
            thing = ask()
            if isinstance(thing, nn.Module):
                known |= {f"{name}:{key}": one for key, one in thing.named_modules()}
            elif thing is not None:
                known[name] = thing
            if name in self.tensors:
                known |= {f"{name}.{key}": tensor for key, tensor in self._living(name).items()}
        return known


# -- the runs of this process ------------------------------------------------------------------------------------


def names_of_runs() -> tuple[str, ...]:
    """Return the names of the runs that have returned in this process, or were passed over, in their order."""
    return tuple(run.name for run in _earlier)


def begin_run(name: str, state: State, *, is_new: bool) -> bool:
    """Get ready for a run of `state`, in which a replacement wants what earlier runs have left. Return whether a rank
    that is lost in it can be replaced.

    From the second run of one name on none can: a replacement could not tell them apart. Then nothing more is kept.
    """
    global _is_repeated
    # What `is_new` has not met the others yet, who know better, and refuse it.
    _is_repeated |= name in _begun and not is_new
    if _is_repeated:
        if _begun:
            _logger.warning(
                "phalanx.elastic: %s is elastic.run a second time in this job, and a rank that is lost from here on "
                "ends the job. What replaces one begins with the script, and could not tell the runs apart. Put them "
                "into one function: `if state.phase == 0: ...; state.phase = 1`.",
                name,
            )
        _begun.clear()
        _earlier.clear()
        return False
    _begun.add(name)
    for run in _earlier:
        run.keep_for(state)
    return True


def note_returned(name: str, state: State, result: Any) -> None:
    """Note that a run has returned on all ranks."""
    _earlier.append(EarlierRun.of(name, state, result))


def tell_latest(group: Any) -> None:
    """Have each rank know what the others have for themselves of the run before this one. All ranks call it."""
    if _earlier:
        _earlier[-1].tell(group)


def pass_over(number: int, source: int, receivers: Sequence[int], name: str, state: State, group: Any) -> None:
    """Give the `receivers`, whose script is at run `number`, what that run has left. All ranks call it.

    A receiver has the run among its own then, and `state` as the run has left it, as far as it is left.

    Raises:
        JobEndedError: the objects of this rank's State are not those of the others.
    """
    me = group.rank()
    told: list[Any] = [None]
    values: dict[str, Any] = {}
    if me == source:
        run = _earlier[number]
        parts = {one: run._part(one) for one in run.things if one not in run.copies}
        values = {one: part.show() for one, part in parts.items() if part is not None}
        values |= {one: copy.show() for one, copy in run.copies.items()}
        told = [(list(values), run.told, run.own)]
    dist.broadcast_object_list(told, group=group, group_src=source)
    names, owns, theirs = told[0]
    if me not in receivers:
        hand_over([GivenPart(values.get(one)) for one in names], source, receivers, group)
        return
    run = EarlierRun(name, told=owns)
    run._refer_to(state)
    parts = {one: run._part(one) for one in run.things}
    hand_over([parts.get(one) or GivenPart() for one in names], source, receivers, group)
    is_sampler = {one: isinstance(thing, DistributedSampler) for one, thing in state._things.items()}
    if gone := [one for one in run.things if not is_sampler[one] and (one not in names or parts[one] is None)]:
        _logger.warning(
            "phalanx.elastic: %s of an elastic.run that the others have finished is not handed over (they have let go "
            "of it; or it is a Pipeline, a ZeroRedundancyOptimizer or an optimizer of parameters that no model in "
            "State has): this rank has it as the script has made it. What the script computes from it must be in the "
            "State of a later run.",
            ", ".join(map(repr, gone)),
        )
    run.own = owns[me] if len(owns) == group.size() else b""
    if not run.own:
        run.own = theirs
        _logger.warning(
            "phalanx.elastic: nothing is left of what rank %d had for itself at the end of %s (it is more than 1 MiB, "
            "or the number of ranks has changed since): it goes on with the result, the values and the buffers of rank "
            "%d, and with the same random states.",
            me,
            name,
            source,
        )
    run._restore_own(state)
    _earlier.append(run)


def result_of_latest() -> Any:
    """Return what the run that was passed over has returned.

    Raises:
        TypeError: it cannot be pickled.
    """
    run = _earlier[-1]
    own: _Own = pickle.loads(run.own)
    if own.why:
        raise TypeError(
            f"phalanx.elastic: {run.name} has returned what cannot be pickled, so that this rank, which replaces one "
            f"that was lost later, does not get it: {own.why}.\nReturn numbers, tensors, or objects of the State."
        )
    return _unpickled(own.result, run._known())


def _refer(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # its class has __slots__
        return lambda: thing


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _pickled(value: Any, known: Mapping[str, Any]) -> bytes:
    """Pickle `value`; objects that all ranks have are stored as their names."""
    names = {id(one): name for name, one in known.items() if one is not None}

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> str | None:
            return names.get(id(one))

    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _unpickled(data: bytes, known: Mapping[str, Any]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return known[name]

    return Unpickler(io.BytesIO(data)).load()
