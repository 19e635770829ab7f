"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future`: the future's value is the result of the call.

    Meanwhile the thread that ran the function serves other calls. The decorator works for functions, for static and
    class methods (put `@staticmethod` or `@classmethod` above it), and for methods called through a reference.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
