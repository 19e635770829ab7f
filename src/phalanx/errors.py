"""Every exception that Phalanx raises for what the world does, named by whose doing it was.

    RuntimeError
    └── PhalanxError
        ├── ClosedError        you closed it: the group was destroyed, or this process is a fork of a rank
        ├── MismatchError      ranks disagree: different operation, shape, dtype or model     (also DistBackendError)
        ├── PeerLostError      a peer died or left                                          (also DistBackendError)
        ├── DeadlineError      time ran out                                              (also TimeoutError)
        ├── LaunchError        the job could not be started, or one of its ranks failed
        ├── CoordinationError  the job's coordinator cannot be reached, ended, or has given this process up
        │   └── AuthenticationError  a key is missing, unsafe, or another than the coordinator's
        ├── CheckpointError    a checkpoint could not be written, or is not what it should be
        └── InternalError      our bug: please report it

A wrong call (an argument that no world could make right) raises `ValueError` or `TypeError` at the door instead.

`MismatchError` and `PeerLostError` are also `torch.distributed.DistBackendError`, which PyTorch's users already catch.
They are built on first use, because the launcher raises errors of this module and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any


def message_of(error: BaseException) -> str:
    """Return the text of an exception, which may be a user's; never raises."""
    try:
        return str.__str__(str(error))  # a subclass of str might not be pickled
    except BaseException as second:
        return f"(its text cannot be had: __str__ raised {class_of(second)})"


def class_of(error: BaseException) -> str:
    """Return the name of an exception's class, with its module; never raises."""
    try:
        return f"{type(error).__module__}.{type(error).__qualname__}"
    except BaseException:  # a metaclass of the user's
        return type.__dict__["__name__"].__get__(type(error))  # type: ignore[no-any-return]


def summary_of(error: BaseException) -> str:
    """Return `ValueError: too large`, as the last line of a traceback has it; never raises."""
    return f"{class_of(error).rpartition('.')[2]}: {message_of(error)}"


class PhalanxError(RuntimeError):
    """The root of the tree: an operation failed, and the message says where, why and what to do.

    Of a failed operation of a group the same is in the fields `operation` ('all_reduce'), `seq` (its number), `group`
    (its name), `rank` (of this process in it), `call_site` ('train.py:88') and `positions` (of other ranks that the
    message tells of: what each did last). What is not known is empty; a number that is not known is 0, a rank -1.
    """

    operation = ""
    seq = 0
    group = ""
    rank = -1
    call_site = ""
    positions: Mapping[int, str] = MappingProxyType({})


class ClosedError(PhalanxError):
    """The group, its memory or the job was closed before the call, by this process."""


class DeadlineError(PhalanxError, TimeoutError):
    """Time ran out. `missing` holds the ranks that had not answered, in the group's numbering."""

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"missing": self.missing}), self.__dict__


class LaunchError(PhalanxError):
    """The job could not be started as asked. `exit_code` is what the command should return."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"exit_code": self.exit_code})


class CoordinationError(PhalanxError):
    """The job's coordinator cannot be reached, has ended, or no longer counts this process as a member.

    `reason`: "unreachable" (nobody answers at the address), "stranger" (something else does), "another job" (a
    coordinator does, of another job), "lost" (it was there and has gone), "expelled" (it counts us out); or empty.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"reason": self.reason})


class AuthenticationError(CoordinationError):
    """A key is missing, can be read by others, or is not the one of the coordinator (or of who asked to be let in)."""


class CheckpointError(PhalanxError):
    """A checkpoint could not be written, read, or does not fit what it is loaded into."""


class InternalError(PhalanxError):
    """Something that Phalanx guarantees did not hold. It is our bug; the message asks for a report."""


def _rebuild(cls: type[PhalanxError], message: str, fields: Mapping[str, Any]) -> PhalanxError:
    return cls(message, **fields)


if TYPE_CHECKING:

    class MismatchError(PhalanxError):
        """Ranks disagree about what to do. `calls` maps each rank to its own call, in words."""

        calls: dict[int, str]

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None: ...

    class PeerLostError(PhalanxError):
        """A peer died or left. `ranks` names who, in the group's numbering."""

        ranks: tuple[int, ...]

        def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None: ...


def _define_torch_errors() -> None:
    """Create the two classes that are also torch's `DistBackendError`; costs one import of torch, once."""
    try:
        from torch.distributed import DistBackendError
    except ImportError:  # a torch without torch.distributed, or no torch at all: the names still exist
        DistBackendError = RuntimeError  # type: ignore[misc,assignment]

    class MismatchError(PhalanxError, DistBackendError):
        """Ranks disagree about what to do. `calls` maps each rank to its own call, in words."""

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None:
            super().__init__(message)
            self.calls = dict(calls or {})

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuild, (type(self), str(self), {"calls": self.calls}), self.__dict__

    class PeerLostError(PhalanxError, DistBackendError):
        """A peer died or left. `ranks` names who, in the group's numbering."""

        def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
            super().__init__(message)
            self.ranks = ranks

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuild, (type(self), str(self), {"ranks": self.ranks}), self.__dict__

    for cls in (MismatchError, PeerLostError):
        cls.__module__, cls.__qualname__ = __name__, cls.__name__
        globals()[cls.__name__] = cls


def __getattr__(name: str) -> Any:
    if name in ("MismatchError", "PeerLostError"):
        _define_torch_errors()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
