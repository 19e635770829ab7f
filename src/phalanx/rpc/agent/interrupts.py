"""Defer Ctrl-C while the main thread sends or reads, where an exception would lose a message or leave a lock acquired.

    main thread    send | wait in C .. Ctrl-C .. | KeyboardInterrupt
    main thread    send | read .. Ctrl-C .. | make the result | KeyboardInterrupt

Python raises KeyboardInterrupt between any two bytecodes of the main thread. While this process is a worker, our SIGINT
handler replaces Python's own and defers the exception until the main thread may be interrupted. The user's handlers
stay: while a handler may raise at any time (a SIGALRM timeout), the reader sends and reads for the main thread.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

_main = threading.main_thread().ident
# Plain integers, looked up with `_signal`, because every call does so, and `signal.getsignal` would create an enum each
# time. A handler of SIGTERM is not looked up, because it usually ends the process.
_ALARM, _INTERRUPT, _USER_1, _USER_2 = map(int, (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
_handler_of: Callable[[int], Any] = _signal.getsignal


class _Deferral:
    """A `_Deferral` is the main thread's state. `depth` counts the nested sections that must not be interrupted."""

    __slots__ = ("depth", "is_pending")

    def __init__(self) -> None:
        self.depth = 0
        self.is_pending = False


_state = _Deferral()


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.depth:
        _state.is_pending = True
    else:
        signal.default_int_handler(number, frame)


def install() -> None:
    """Defer Ctrl-C between `defer` and `allow` from now on."""
    with contextlib.suppress(ValueError):  # raised in any thread but the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _handle)


def uninstall() -> None:
    """Restore Python's handler of SIGINT."""
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def may_raise() -> bool:
    """Return whether a signal handler of the user may raise in this thread; its exception could not be deferred."""
    if get_ident() != _main:
        return False
    if callable(_handler_of(_ALARM)) or callable(_handler_of(_USER_1)) or callable(_handler_of(_USER_2)):
        return True
    handler = _handler_of(_INTERRUPT)
    return handler is not _handle and callable(handler)


def reset() -> None:
    """Reset the state in a forked child: its only thread becomes the main thread, and defers nothing."""
    global _main, _state
    _main, _state = get_ident(), _Deferral()


def defer() -> None:
    """Begin a section in which this thread must not be interrupted."""
    if get_ident() == _main:
        _state.depth += 1


def allow(*, may_raise: bool = True) -> None:
    """End the section. With `may_raise`, raise a deferred KeyboardInterrupt; otherwise a later `check` raises it."""
    if get_ident() == _main and _state.depth:  # 0 in a forked child, even if the parent forked inside a section
        _state.depth -= 1
        if _state.is_pending and may_raise and not _state.depth:
            _state.is_pending = False
            raise KeyboardInterrupt


def check() -> None:
    """Raise a deferred KeyboardInterrupt, if any: the caller may be interrupted here."""
    if _state.is_pending and get_ident() == _main:
        _state.is_pending = False
        raise KeyboardInterrupt


def wait(until: Callable[[], object]) -> None:
    """Call `until`, a wait that may be interrupted at any time."""
    if get_ident() != _main:
        until()
        return
    state = _state  # a signal handler may fork: the child has another state
    depth, state.depth = state.depth, 0
    try:
        check()
        until()
    finally:
        state.depth = depth
