"""These decorators mark functions that other workers call: what may be done with a call of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future`, whose value, once it is set, is the result of the call.

    The thread that ran the function serves other calls until then. This works on functions, on static and class methods
    (outermost is then `@staticmethod`, `@classmethod`), and on methods called through a reference.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def idempotent(fn: F) -> F:
    """Mark a function that may run more than once for one call, without harm.

    A call of it whose worker is lost is made again, within its time-out, when a worker of that name has joined; this
    needs a job whose workers join and leave. Without this mark no call is ever made twice. `rpc_sync(...,
    idempotent=True)` marks one call.

    The object of a reference is lost with its worker: methods called through a reference are not made again. Nor is a
    call inside `autograd.context()`: its worker may have lost a part of the graph.
    """
    fn._is_idempotent = True  # type: ignore[attr-defined]
    return fn
