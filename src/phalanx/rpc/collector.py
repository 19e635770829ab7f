"""Disable Python's garbage collector in code that is not reentrant.

A collection runs the user's finalizers wherever a thread allocates. A finalizer that makes an RPC would then wait for
its own thread, which is in the middle of sending or reading.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_collector(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap `function`, which should be short, so that no thread begins a collection while it runs."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return call
