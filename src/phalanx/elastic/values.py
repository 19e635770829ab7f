"""Restore plain values in place, because the script may refer to the same objects by names of its own.

history = []
state = State(history=history)      the loop calls `history.append`, and `state.history` is the same list after a loss
"""

from __future__ import annotations

import copyreg
import gc
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

_CONTAINERS = frozenset((list, deque, dict, defaultdict, OrderedDict, Counter, set))
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # pickled by name
_HOOKS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")


def restore_values(values: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Replace `values` by `saved`, whose objects nothing else refers to; keep the objects in `values` where possible.

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
