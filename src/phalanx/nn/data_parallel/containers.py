"""Look into containers for tensors: tuples (named ones too), lists and dicts, however nested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `function(tensor)` in place of each tensor; containers are new, everything else is shared."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return rebuild(value, [map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        return rebuild_dict(value, {key: map_tensors(function, item) for key, item in value.items()})
    return value


def rebuild(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return a tuple, named tuple or list of the class of `like` with other items."""
    return type(like)._make(items) if hasattr(like, "_make") else type(like)(items)


def rebuild_dict(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict like `like`, with its class (a defaultdict has its factory), and other values."""
    changed = copy.copy(like)
    changed.update(items)
    return changed
