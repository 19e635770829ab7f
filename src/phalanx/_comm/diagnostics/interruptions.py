"""Distinguish exceptions from the user's signal handlers, which may occur anywhere in our code, from our own errors."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


def is_interruption(error: BaseException) -> bool:
    """Return whether an error came from outside our code, so that it must be passed on.

    Such an error is not an `Exception` (KeyboardInterrupt, for example), or was raised by a signal handler or a
    debugger's trace function. Python passes such a function the frame that it interrupts, so a function that has its
    caller's frame among its local variables has interrupted that frame.
    """
    if not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        for value in trace.tb_frame.f_locals.values():
            if value is interrupted or (type(value) is tuple and any(one is interrupted for one in value)):
                return True
    return False


class SuppressedErrors:
    """A `SuppressedErrors` context suppresses errors, but not interruptions; `report` is called with each error."""

    def __init__(self, report: Callable[[Exception], None] = lambda error: None) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or is_interruption(error):
            return False
        self._report(error)
        return True
