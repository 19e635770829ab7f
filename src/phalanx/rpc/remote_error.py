"""Serialize an exception on the worker that raised it, and rebuild it on the caller's worker."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from phalanx.errors import PhalanxError, class_of, message_of


class RemoteError(PhalanxError):
    """A function of another worker raised an exception that cannot be rebuilt here; `kind` names its class."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (str(self), self.kind)


class MissingFunctionError(PhalanxError, AttributeError):
    """The called worker does not have the function or class that the call names."""


class RemoteTraceback(Exception):
    """A `RemoteTraceback` is the traceback on another worker; it is the `__cause__` of the exception raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuild_error(message: str, kind: str) -> RemoteError:
    return RemoteError(message, kind=kind)


def pack(error: BaseException, where: str) -> bytes:
    """Return `error`, raised on the worker `where`, as bytes.

    Never raises, even if printing, formatting or pickling the error raises: the caller waits for an answer.
    """
    message, kind = message_of(error), class_of(error)
    whole = bare = None
    if isinstance(error, Exception):  # SystemExit must not end the caller
        whole = _dumps(error)
        bare = _dumps((type(error), message))
    return pickle.dumps((whole, bare, kind, message, f"On {where}:\n{_format(error, kind, message)}"), 5)


def _format(error: BaseException, kind: str, message: str) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # an attribute of the error, or of one of its causes, has raised
        return f"{kind}: {message}\n"


def _dumps(obj: Any) -> bytes | None:
    try:
        return pickle.dumps(obj, 5)
    except BaseException:  # it contains a lock or a local class, or a pickle hook of the user has raised
        return None


def unpack(data: bytes) -> Exception:
    """Return the exception to raise here: of its original type if possible, with the other worker's traceback."""
    whole, bare, kind, message, text = pickle.loads(data)
    error = _rebuild(whole, bare)
    if error is None:
        error = RemoteError(
            f"{kind}: {message}\n(It cannot be rebuilt here: its class is missing, or asks for other arguments. "
            "Original exception on remote side was raised as the traceback above says.)",
            kind=kind,
        )
    _set_cause(_first_cause(error), RemoteTraceback(text))
    return error


# `BaseException.__cause__` itself: the user's class may override the attribute.
_get_cause: Callable[[BaseException], BaseException | None] = BaseException.__dict__["__cause__"].__get__
_set_cause: Callable[[BaseException, BaseException], None] = BaseException.__dict__["__cause__"].__set__


def _first_cause(error: BaseException) -> BaseException:
    """Return the last exception in a chain of causes; in a circular chain, the last one before it repeats."""
    seen = {id(error)}
    cause = _get_cause(error)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        error, cause = cause, _get_cause(cause)
    return error


def _rebuild(whole: bytes | None, bare: bytes | None) -> Exception | None:
    for data in (whole, bare):
        if data is None:
            continue
        try:
            made = pickle.loads(data)
            if data is bare:
                made = made[0](made[1])
        except KeyboardInterrupt:
            if threading.current_thread() is threading.main_thread():  # it may be the user's Ctrl-C
                raise
        except BaseException:  # the class is missing here, needs more arguments, or exits
            continue
        else:
            # it may be rebuilt as something else, such as SystemExit, which must not end the caller
            if issubclass(type(made), Exception):
                return made  # type: ignore[no-any-return]
    return None


def set_error(future: Future[Any], make: Callable[[], BaseException]) -> None:
    """Set the error of `future`: each wait raises a new exception, which `make` returns.

    An exception stored in a Future would never be freed once it was raised: it refers to the frames that it passed
    through, one of these refers to the Future, and Python's garbage collector does not see a Future's references.
    """

    def fail(_: object) -> None:
        raise make()

    future._set_unwrap_func(fail)  # Future.set_exception does the same
    future.set_result(None)


def error_of(done: Any) -> BaseException:
    """Return the error that a failed future raises, as a new exception."""
    try:
        done.value()
    except BaseException as error:
        return error
    raise AssertionError("it has not failed")
