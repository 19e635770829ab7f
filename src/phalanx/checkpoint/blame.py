"""Find the value in a state that torch.load would refuse to load, and name it by its path."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from phalanx.checkpoint.slices import SlicedTensor

_PLAIN = (int, float, str, bool, type(None), bytes, complex)


def describe_unsafe_value(state: object) -> tuple[str, str]:
    """Return the value that makes a state unsafe, and what to save instead; both "" if no such value is found.

    This checks every value of the state, so call it only when reporting an error.
    """
    try:
        for path, value in _leaves("state", state, set()):
            if not _is_readable(value):
                return f"{path} is {_a(_name(type(value)))}", _advice(path, value)
    except Exception:
        # The state is nested too deeply, or a user's __repr__ raises. Do not raise: other ranks wait for the report.
        pass
    return "", ""


def is_plain(value: Any) -> bool:
    """Return whether torch.load can open `value`. Tensors are not checked, although torch.load may refuse a subclass.

    Cost: a type check for each value in lists and dicts; a trial save of each value of another class.
    """
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return True
    if type(value) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return _is_readable(value)


def _leaves(path: str, value: object, above: set[int]) -> Iterator[tuple[str, object]]:
    """Yield every value that is not a container, with the expression that leads to it."""
    if id(value) in above:
        return
    inside: Iterator[tuple[str, object]]
    if isinstance(value, dict):
        yield from ((f"the key {key!r} of {path}", key) for key in value)
        inside = ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif type(value) in (list, tuple):
        inside = ((f"{path}[{number}]", item) for number, item in enumerate(value))  # type: ignore[var-annotated,arg-type]
    else:
        yield path, value
        return
    for where, item in inside:
        yield from _leaves(where, item, above | {id(value)})
    if type(value) not in (dict, OrderedDict, list, tuple):
        yield path, value  # the class, or its default_factory, may be unsafe


def _is_readable(value: object) -> bool:
    if type(value) in (torch.Tensor, torch.nn.Parameter, SlicedTensor):
        return True  # without a trial save, which would copy the tensor
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        return not torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    except Exception:  # a user's __reduce__ may raise anything
        return False


def _advice(path: str, value: Any) -> str:
    if path.startswith("the key"):
        return "Use numbers and strings as keys."
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item"):
        array = getattr(value, "ndim", 0) > 0
        return f"Save torch.from_numpy({path}) instead." if array else f"Save {path}.item() instead."
    if isinstance(value, argparse.Namespace):
        return f"Save vars({path}) instead."
    if isinstance(value, enum.Enum):
        return f"Save {path}.name instead."
    if isinstance(value, os.PathLike):
        return f"Save str({path}) instead."
    if dataclasses.is_dataclass(value):
        return f"Save dataclasses.asdict({path}) instead."
    if hasattr(value, "state_dict"):
        return f"Save {path}.state_dict() instead."
    if isinstance(value, Mapping):
        return f"Save dict({path}) instead."
    return ""


def publish_name(full: str) -> str:
    """Return the public name of a class that a pickle calls `full`.

    Python 3.13 defines pathlib's classes in `pathlib._local`, and exports them from `pathlib`.
    """
    module, _, name = full.rpartition(".")
    package, _, last = module.rpartition(".")
    known = getattr(sys.modules.get(package), name, None) if last.startswith("_") else None
    is_shown = known is not None and known is getattr(sys.modules.get(module), name, None)
    return f"{package}.{name}" if is_shown else full


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return publish_name(f"{kind.__module__}.{kind.__qualname__}")


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
