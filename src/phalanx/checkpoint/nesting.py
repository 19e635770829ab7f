"""Find out why a state cannot be taken apart: a container in it holds itself, or containers are nested too deeply."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class NestingError(Exception):
    """The containers of a state have no end. The message names the one to blame."""


def describe_nesting(state: object) -> str:
    """Return which container in `state` holds itself, or else that they are nested too deeply.

    It keeps a stack of its own, since this is for states on which recursion has failed.
    """
    above = {id(state): "state"}
    done: set[int] = set()
    stack = [("state", state, _inside(state))]
    while stack:
        path, value, inside = stack[-1]
        for key, item in inside:
            where = f"{path}[{key!r}]"
            if id(item) in above:
                return f"{where} is {above[id(item)]} itself, so the state has no end"
            if id(item) not in done and isinstance(item, (dict, list, tuple)):
                above[id(item)] = where
                stack.append((where, item, _inside(item)))
                break
        else:
            stack.pop()
            del above[id(value)]
            done.add(id(value))
    return "the dicts, lists and tuples of the state are nested too deeply for Python"


def _inside(value: object) -> Iterator[tuple[object, object]]:
    """Yield what a container holds, with its keys or positions; those with a class of their own count as values."""
    if type(value) in (dict, OrderedDict):
        yield from value.items()  # type: ignore[attr-defined]
    elif type(value) in (list, tuple):
        yield from enumerate(value)  # type: ignore[arg-type]
