"""Find out why a state cannot be traversed: a container contains itself, or containers are nested too deeply."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class NestingError(Exception):
    """The containers of a state have no end. The message names the container at fault."""


def describe_nesting(state: object) -> str:
    """Return which container in `state` contains itself, or else that containers are nested too deeply.

    This uses its own stack, since it is for states on which recursion has failed. A container's name is as long
    as the container is deep, so only the names that are returned are made.
    """
    depths = {id(state): 0}
    done: set[int] = set()
    stack: list[tuple[object, object, Iterator[tuple[object, object]]]] = [(None, state, _inside(state))]

    def name(depth: int) -> str:
        return "state" + "".join(f"[{key!r}]" for key, _, _ in stack[1 : depth + 1])

    while stack:
        _, value, inside = stack[-1]
        for key, item in inside:
            if id(item) in depths:
                return f"{name(len(stack))}[{key!r}] is {name(depths[id(item)])} itself, so the state has no end"
            if id(item) not in done and isinstance(item, (dict, list, tuple)):
                depths[id(item)] = len(stack)
                stack.append((key, item, _inside(item)))
                break
        else:
            stack.pop()
            del depths[id(value)]
            done.add(id(value))
    return "the dicts, lists and tuples of the state are nested too deeply for Python"


def _inside(value: object) -> Iterator[tuple[object, object]]:
    """Yield a container's elements with their keys or positions; containers of a user's class count as values."""
    if type(value) in (dict, OrderedDict):
        yield from value.items()  # type: ignore[attr-defined]
    elif type(value) in (list, tuple):
        yield from enumerate(value)  # type: ignore[arg-type]
