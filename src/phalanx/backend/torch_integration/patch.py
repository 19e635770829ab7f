"""How a change to torch is applied: once in a process, however often it is asked for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

_applied: set[str] = set()


def once(patch: Callable[..., None]) -> Callable[..., None]:
    """Apply a patch at its first call in a process, and do nothing at the later ones."""

    @functools.wraps(patch)
    def apply(*args: Any) -> None:
        if patch.__qualname__ not in _applied:
            _applied.add(patch.__qualname__)
            patch(*args)

    return apply


def distributed_c10d() -> ModuleType:
    """Return torch's module of process groups, imported when it is first needed."""
    return importlib.import_module("torch.distributed.distributed_c10d")
