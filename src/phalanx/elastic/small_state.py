"""`SmallState` captures and restores the state of one rank apart from parameters and optimizers.

    values            the plain values of State                         {"best": 0.25}
    others            states of small objects with `state_dict`          a metric
    extra             the results of layers' `get_extra_state`           float8 scales
    attributes        numbers, strings and generators in layers of the script's own classes
    buffers           of models that no optimizer trains                 an averaged model

The small state is captured at each commit, and restored after a loss. If ranks differ, each restores its own.
"""

from __future__ import annotations

import copyreg
import gc
import marshal
import pickle
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.elastic.buffers import Buffers
from phalanx.elastic.frozen import Frozen, freeze, thaw
from phalanx.elastic.objects import Objects

_POSITION = ("epoch", "step")  # restored with the number of the commit
_PLAIN = b"values:"  # this prefix, with which no pickle begins, then the values in Python's fastest format
_NUMBERS = frozenset((int, float, bool, complex, str, type(None)))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

NO_VALUES = Frozen(_PLAIN + marshal.dumps({}, 2), [])
"""The small state of a rank that has none of its own."""


class SmallState:
    """`SmallState` captures and restores the small state of one rank.

    Cost: microseconds in each commit, plus the time of the script's `get_extra_state`.
    """

    def __init__(self, objects: Objects, values: dict[str, Any]) -> None:
        self._objects, self._values = objects, values
        layers = objects.named_layers()
        trained = {id(layer) for module in objects.trained for layer in module.modules()}
        self._buffers = Buffers({key: layer for key, layer in layers.items() if id(layer) not in trained})
        plain = nn.Module.get_extra_state
        self._extra = {key: layer for key, layer in layers.items() if type(layer).get_extra_state is not plain}
        self._user_layers = {key: layer for key, layer in layers.items() if _is_user_class(type(layer))}
        averages = any(id(layer) not in trained for layer in layers.values())
        # whether the state has only plain values
        self._is_plain = not (objects.small or self._extra or self._user_layers or averages)

    def capture(self, values: Mapping[str, Any]) -> Frozen:
        """Return an immutable copy of the current state, with the `values` that the script has set.

        Raises:
            TypeError: a value, or the state of an object, cannot be pickled.
        """
        if self._is_plain and len(values) == len(_POSITION):
            return NO_VALUES
        own = {name: value for name, value in values.items() if name not in _POSITION}
        if self._is_plain and _NUMBERS.issuperset(map(type, own.values())):
            return Frozen(_PLAIN + marshal.dumps(own, 2), [])  # above version 2, equal values may give different bytes
        content: dict[str, Any] = {"values": {name: _shown(value) for name, value in own.items()}}
        if self._objects.small:
            content["others"] = {name: thing.state_dict() for name, thing in self._objects.small.items()}
        if self._extra:
            content["extra"] = {key: layer.get_extra_state() for key, layer in self._extra.items()}
        if self._user_layers:
            content["attributes"] = {key: _numbers_of(layer) for key, layer in self._user_layers.items()}
        try:
            frozen = freeze(content, self._tensor_names)
        except Exception as error:
            raise TypeError(f"State: {_find_unpicklable(content)} cannot be recorded: {error}") from error
        self._buffers.refresh()
        if not self._buffers.tensors and not frozen.tensors:
            return frozen
        whole = pickle.dumps((frozen.data, len(frozen.tensors), self._buffers.plan))
        return Frozen(whole, [t.detach().clone() for t in (*frozen.tensors, *self._buffers.tensors)])

    def restore(self, kept: Frozen) -> None:
        """Restore everything to its state when `kept` was captured, on this rank or another."""
        if kept.data.startswith(_PLAIN):
            own = marshal.loads(kept.data[len(_PLAIN) :])
            self._remove_others(own)
            self._values.update(own)
            return
        frozen, plan = kept, b""
        if kept.tensors:
            data, count, plan = pickle.loads(kept.data)
            frozen = Frozen(data, kept.tensors[:count])
            self._buffers.refresh()
            self._buffers.restore(plan, kept.tensors[count:])
        content = thaw(frozen, self._tensors_by_name)
        values = content["values"]
        self._remove_others(values)
        for name in [name for name, value in values.items() if isinstance(value, _GeneratorState)]:
            _put(self._values, name, values.pop(name))
        restore_values(self._values, values)
        for name, state in content.get("others", {}).items():
            self._objects.small[name].load_state_dict(state)
        for key, state in content.get("extra", {}).items():
            self._extra[key].set_extra_state(state)
        for key, numbers in content.get("attributes", {}).items():
            for name, value in numbers.items():
                _put(vars(self._user_layers[key]), name, value)

    def _remove_others(self, names: Collection[str]) -> None:
        """Remove the values that are not in `names`, which the script has added since, except for epoch and step."""
        for name in self._values.keys() - set(names) - set(_POSITION):
            del self._values[name]

    def _tensors_by_name(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for thing, module in self._objects.named_modules.items():
            named |= {f"{thing}.{name}": tensor for name, tensor in module.named_parameters()}
            named |= {f"{thing}.{name}": tensor for name, tensor in module.named_buffers()}
        return named

    def _tensor_names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._tensors_by_name().items()}


class _GeneratorState(tuple[bytes]):
    """`_GeneratorState` is the state of a generator; restoring it keeps the same generator object."""


def _shown(value: Any) -> Any:
    return _GeneratorState((value.get_state().numpy().tobytes(),)) if isinstance(value, torch.Generator) else value


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, _GeneratorState):
        place[name].set_state(torch.frombuffer(bytearray(value[0]), dtype=torch.uint8))
    else:
        place[name] = value


def _is_user_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "phalanx")


def _numbers_of(layer: nn.Module) -> dict[str, Any]:
    return {
        name: _shown(value)
        for name, value in vars(layer).items()
        if type(value) in _SAVED_TYPES and name not in _OF_EVERY_MODULE
    }


_SAVED_TYPES = frozenset((*_NUMBERS, torch.Generator))


def _find_unpicklable(content: Mapping[str, Any]) -> str:
    for kind, items in content.items():
        for name, value in items.items():
            try:
                freeze(value)
            except Exception:
                return f"{name!r}" if kind == "values" else f"the state of {name!r}"
    return "a value"


# Restore plain values in place, because the script may have its own references to the same objects.
#
#     history = []
#     state = State(history=history)    the loop calls `history.append`; `state.history` is the same list after a loss

_CONTAINERS = frozenset((list, deque, dict, defaultdict, OrderedDict, Counter, set))
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # pickled by name
_HOOKS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")


def restore_values(values: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set `values` to `saved`, whose objects nothing else refers to; keep the objects in `values` where possible.

    Lists, dicts, sets, deques, generators of Python and NumPy, and objects that are pickled by their `__dict__` are
    kept. An object is replaced if its type has changed, or if `saved` contains it a second time, inside another value.

    Cost: a visit to each object inside `saved`.
    """
    inner = _find_inner(saved)
    results: dict[int, Any] = {}  # by id of the saved object
    kept: set[int] = set()
    for name, value in saved.items():
        if id(value) not in results:
            own = values.get(name)
            results[id(value)] = value
            if id(value) not in inner and id(own) not in kept and _can_load(own, value):
                _load(own, value)
                results[id(value)] = own
                kept.add(id(own))
        values[name] = results[id(value)]


def _find_inner(saved: Mapping[str, Any]) -> set[int]:
    """Return the ids of the objects inside the values of `saved`: in lists, dicts and attributes, at any depth."""
    inner: set[int] = set()
    unread = list(saved.values())
    while unread:
        for one in gc.get_referents(unread.pop()):
            if id(one) not in inner and not isinstance(one, _SHARED):
                inner.add(id(one))
                unread.append(one)
    return inner


def _can_load(own: Any, saved: Any) -> bool:
    kind = type(saved)
    if type(own) is not kind:
        return False
    if kind is deque:
        return bool(own.maxlen == saved.maxlen)
    if _is_numpy_generator(kind):
        return type(own.bit_generator) is type(saved.bit_generator)
    return kind in _CONTAINERS or kind is random.Random or _is_pickled_by_dict(kind)


def _load(own: Any, saved: Any) -> None:
    kind = type(saved)
    if kind in _CONTAINERS:
        own.clear()
        own.extend(saved) if kind in (list, deque) else own.update(saved)
    elif kind is random.Random:
        own.setstate(saved.getstate())
    elif _is_numpy_generator(kind):
        own.bit_generator.state = saved.bit_generator.state
    else:
        vars(own).clear()
        vars(own).update(vars(saved))


def _is_numpy_generator(kind: type) -> bool:
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and kind is numpy.Generator


class _Plain:
    pass


def _is_pickled_by_dict(kind: type) -> bool:
    """Return whether `__dict__` is the whole state of an object of this kind: it has no slots and no base in C."""
    has_hooks = any(getattr(kind, hook, None) is not getattr(object, hook, None) for hook in _HOOKS)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_plain = _layout(kind) == _layout(_Plain)
    return is_plain and not has_slots and not has_hooks and kind not in copyreg.dispatch_table


def _layout(kind: type) -> tuple[int, int, int]:
    return kind.__basicsize__, kind.__itemsize__, kind.__dictoffset__  # NoneType differs only here on Python 3.12
