"""Keep Python's garbage collector out of code that must not be entered again by its thread.

A collection runs finalizers of the user's wherever this thread allocates something. One that calls by rpc would find
its own thread in the midst of sending or reading, and wait for it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_collector(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function`, during which no collection begins in this process. It should be short."""

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
