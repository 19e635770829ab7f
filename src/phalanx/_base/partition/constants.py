"""Watch the plain attributes that forward read while it was traced, since they are constants in the graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, bool, str, type(None))
_MOST_ITEMS = 32
_UNKNOWN = object()


class TracedConstants:
    """`TracedConstants` are the numbers, strings and containers of them that forward read from modules."""

    def __init__(self) -> None:
        self._read: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the attributes that are read from modules in the block; this replaces a method of nn.Module."""
        read = self._read
        before = vars(nn.Module).get("__getattribute__")

        def note(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in _INTERNAL and name in object.__getattribute__(module, "__dict__"):
                read.setdefault((module, name), _copy_plain(value))
            return value

        nn.Module.__getattribute__ = note  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]

    def warn_of_changes(self, root: nn.Module) -> None:
        """Warn once of each attribute that has changed since. `root` is the model."""
        for (module, name), was in list(self._read.items()):
            now = _UNKNOWN if was is _UNKNOWN else _copy_plain(vars(module).get(name, _UNKNOWN))
            if was is _UNKNOWN or (now is not _UNKNOWN and _is_same(was, now)):
                continue
            del self._read[module, name]
            where = next((prefix for prefix, inner in root.named_modules() if inner is module), "")
            name = f"{where}.{name}" if where else name
            warnings.warn(
                f"Pipeline: self.{name} has changed since the model was cut, and the change has no effect: forward "
                f"was traced with {was!r:.80}. Make it a buffer (register_buffer), let a child module read it, "
                "or cut the model again.",
                stacklevel=4,
            )


def _copy_plain(value: Any, depth: int = 3) -> Any:
    """Copy a small value of plain data, which is compared in every step."""
    if type(value) in _PLAIN:
        return value
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_ITEMS or not depth:
        return _UNKNOWN
    items = [_copy_plain(item, depth - 1) for item in (value.values() if type(value) is dict else value)]
    if any(item is _UNKNOWN for item in items):
        return _UNKNOWN
    return dict(zip(value, items, strict=True)) if type(value) is dict else type(value)(items)


def _is_same(was: Any, now: Any) -> bool:
    return type(was) is type(now) and repr(was) == repr(now)  # a NaN is not equal to itself
