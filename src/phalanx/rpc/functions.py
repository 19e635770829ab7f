"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """The function returns a `torch.futures.Future`; its value, once it has one, is the result of the call.

    So the thread that ran the function serves other calls meanwhile. Works on functions, static and class methods
    (outermost is then `@staticmethod`, `@classmethod`), and on methods called through a reference.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
