"""Apply a change to torch once in a process, and only if torch has the names that the change needs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from phalanx._base.torch_names import describe_missing, report_loss


@dataclass(frozen=True)
class Patch:
    """A `Patch` is a change to torch.

    `needs` lists the names of torch that it uses, in the format of `torch_names.find`; `loses` describes the feature
    that is lost without them.
    """

    name: str
    needs: tuple[str, ...]
    loses: str


patches: list[Patch] = []
"""The patches in all imported modules."""

_applied: set[str] = set()


def patch(*needs: str, loses: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Apply a change to torch at the first call of the decorated function, if torch has all names in `needs`.

    Otherwise the function changes nothing, and logs one line about the lost feature.
    """

    def decorate(change: Callable[..., None]) -> Callable[..., None]:
        name = f"{change.__module__.rpartition('.')[2]}.{change.__qualname__}"
        patches.append(Patch(name, needs, loses))

        @functools.wraps(change)
        def apply(*args: Any) -> None:
            if name in _applied:
                return
            _applied.add(name)
            if problem := next(filter(None, map(describe_missing, needs)), ""):
                report_loss(problem, loses)
            else:
                change(*args)

        return apply

    return decorate


def distributed_c10d() -> ModuleType:
    """Return the module `torch.distributed.distributed_c10d`; import it if necessary."""
    return importlib.import_module("torch.distributed.distributed_c10d")
