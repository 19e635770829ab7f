"""An exception on its way from the worker that raised it to the one that called."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from phalanx.errors import PhalanxError


class RemoteError(PhalanxError):
    """A function of another worker raised an exception that cannot be rebuilt here; `kind` names its class."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (str(self), self.kind)


class MissingFunctionError(PhalanxError, AttributeError):
    """What a call names is not there on the worker that is called."""


class RemoteTraceback(Exception):
    """Where an exception was raised on another worker: the cause of the one that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuild_error(message: str, kind: str) -> RemoteError:
    return RemoteError(message, kind=kind)


def pack(error: BaseException, where: str) -> bytes:
    """`error`, raised at the worker `where`, as bytes; always works."""
    text = f"On {where}:\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    is_ours = isinstance(error, Exception)  # SystemExit must not end the caller
    whole = bare = None
    if is_ours:
        whole = _dumps(error)
        bare = _dumps((type(error), str(error)))
    return pickle.dumps((whole, bare, kind, _message(error), text), 5)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be had: {second!r})"


def _dumps(obj: Any) -> bytes | None:
    try:
        return pickle.dumps(obj, 5)
    except Exception:  # a lock in it, a class inside a function: whatever pickle's hooks of the user raise
        return None


def unpack(data: bytes) -> BaseException:
    """The exception to raise here: of its own type where that can be rebuilt, with the other worker's traceback."""
    whole, bare, kind, message, text = pickle.loads(data)
    error = _rebuild(whole, bare)
    if error is None:
        error = RemoteError(
            f"{kind}: {message}\n(It cannot be rebuilt here: its class is missing, or asks for other arguments. "
            "Original exception on remote side was raised as the traceback above says.)",
            kind=kind,
        )
    cause = RemoteTraceback(text)
    last = error
    while last.__cause__ is not None and last.__cause__ is not last:
        last = last.__cause__
    last.__cause__ = cause
    return error


def _rebuild(whole: bytes | None, bare: bytes | None) -> BaseException | None:
    for data in (whole, bare):
        if data is None:
            continue
        try:
            made = pickle.loads(data)
            if data is bare:
                made = made[0](made[1])
        except Exception:  # a class that is not here, or whose constructor asks for more
            continue
        if isinstance(made, BaseException):
            return made
    return None


def set_error(future: Future[Any], make: Callable[[], BaseException]) -> None:
    """Let `future` raise what `make` returns, each time anew.

    An exception that a Future holds would never die once it was raised: it holds the frames that it passed through, one
    of them the Future, which Python's garbage collector cannot look into.
    """

    def fail(_: object) -> None:
        raise make()

    future._set_unwrap_func(fail)  # as Future.set_exception does
    future.set_result(None)


def error_of(done: Any) -> BaseException:
    """What a future that has failed raises, made anew."""
    try:
        done.value()
    except BaseException as error:
        return error
    raise AssertionError("it has not failed")
