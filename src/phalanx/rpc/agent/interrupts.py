"""Put Ctrl-C off while the main thread sends or reads, where it would lose a message, or leave a lock behind.

    main thread    send | wait in C .. Ctrl-C .. | KeyboardInterrupt
    main thread    send | read .. Ctrl-C .. | make the result | KeyboardInterrupt

Python raises KeyboardInterrupt between any two steps of the main thread. While a worker is open its handler of SIGINT,
if it is Python's own, waits until that thread can be left. Handlers of the user's own are left as they are: while there
is one that may raise at any time (a time-out by SIGALRM), the main thread leaves sending and reading to the reader.
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
# As numbers, and from `_signal`: each call looks, and `signal` makes an enum of each. One of SIGTERM mostly ends all.
_ALARM, _INTERRUPT, _USER_1, _USER_2 = map(int, (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
_handler_of: Callable[[int], Any] = _signal.getsignal


class _Deferral:
    """`_Deferral` belongs to the main thread. `depth` is how many nested uninterruptible parts the thread is in."""

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
    """Put Ctrl-C off from now on in the parts that ask for it."""
    with contextlib.suppress(ValueError):  # it is raised in any thread but the main one
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _handle)


def uninstall() -> None:
    """Restore the handler of SIGINT."""
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def may_raise() -> bool:
    """Return whether a handler of the user's may raise in this thread at any moment, which cannot be put off."""
    if get_ident() != _main:
        return False
    if callable(_handler_of(_ALARM)) or callable(_handler_of(_USER_1)) or callable(_handler_of(_USER_2)):
        return True
    handler = _handler_of(_INTERRUPT)
    return handler is not _handle and callable(handler)


def reset() -> None:
    """Reset the state in a fork: its only thread is its main one, which is in none of its parent's parts."""
    global _main, _state
    _main, _state = get_ident(), _Deferral()


def defer() -> None:
    """Begin a part in which this thread must not be interrupted."""
    if get_ident() == _main:
        _state.depth += 1


def allow(*, may_raise: bool = True) -> None:
    """End such a part. Raises KeyboardInterrupt if that was put off, and `may_raise`; else the next `check` does."""
    if get_ident() == _main and _state.depth:  # the depth is 0 in a fork that leaves a part that its parent was in
        _state.depth -= 1
        if _state.is_pending and may_raise and not _state.depth:
            _state.is_pending = False
            raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt if that was put off: this place may be interrupted."""
    if _state.is_pending and get_ident() == _main:
        _state.is_pending = False
        raise KeyboardInterrupt


def wait(until: Callable[[], object]) -> None:
    """Call `until`, which waits and may be interrupted at any time."""
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
