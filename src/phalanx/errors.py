"""This module has every exception that Phalanx raises at run time, named by who caused it.

    RuntimeError
    └── PhalanxError
        ├── ClosedError        you closed it: the group was destroyed, or this process is a fork of a rank
        ├── MismatchError      ranks disagree: different operation, shape, dtype or model     (also DistBackendError)
        ├── PeerLostError      a peer died or left                                          (also DistBackendError)
        ├── DeadlineError      time ran out                                              (also TimeoutError)
        ├── LaunchError        the job could not be started, or one of its ranks failed
        ├── CoordinationError  the job's coordinator cannot be reached, ended, or has given this process up
        │   └── AuthenticationError  a key is missing, unsafe, or another than the coordinator's
        ├── CheckpointError    a checkpoint could not be written, or cannot be used
        ├── DataError          a shard of a stream could not be read, or is damaged
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
    except BaseException:  # a metaclass of the user's may raise anything
        return type.__dict__["__name__"].__get__(type(error))  # type: ignore[no-any-return]


def summary_of(error: BaseException) -> str:
    """Return `ValueError: too large`, as the last line of a traceback has it; never raises."""
    return f"{class_of(error).rpartition('.')[2]}: {message_of(error)}"


class PhalanxError(RuntimeError):
    """This is the root of the tree: an operation failed, and the message says where, why and what to do.

    If an operation of a group failed, these fields have the facts: `operation` ('all_reduce'), `seq` (its number),
    `group` (its name), `rank` (the number of this process in the group), `call_site` ('train.py:88') and `positions`
    (what each other rank did last, for those that the message tells of). A text that is not known is empty, a number
    that is not known is 0, and a rank that is not known is -1.

    What to do: read the last line of the message. If you catch this class, you catch all errors of this page.
    """

    operation = ""
    seq = 0
    group = ""
    rank = -1
    call_site = ""
    positions: Mapping[int, str] = MappingProxyType({})


class ClosedError(PhalanxError):
    """This process closed the group, its memory or the job before the call; or it is a fork of a rank.

    What to do: move the call in front of `destroy_process_group`, or in front of the end of `with phalanx.init()`. In
    a child that you have forked, call `init_process_group` again or leave communication to the parent.
    """


class DeadlineError(PhalanxError, TimeoutError):
    """Time ran out. `missing` holds the ranks that had not answered, in the group's numbering.

    What to do: read the log of the missing ranks first; `phalanx stacks` shows where they are while the job runs. If
    they are only slow, raise the timeout: `init_process_group("phalanx", timeout=...)`.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"missing": self.missing}), self.__dict__


class LaunchError(PhalanxError):
    """The job could not be started as asked, or a rank of `phalanx.launch` ended without a result.

    `exit_code` is the command's exit code.

    What to do: the message names each wrong option or the rank that failed. `phalanx doctor` says whether this host
    can train at all.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"exit_code": self.exit_code})


class CoordinationError(PhalanxError):
    """The job's coordinator cannot be reached, has ended, or no longer counts this process as a member.

    `reason`: "unreachable" (nobody answers at the address), "stranger" (something else does), "another job" (a
    coordinator does, of another job), "lost" (it was there and has gone), "expelled" (it counts us out); or empty.

    What to do: "unreachable" means that the address is wrong, that a firewall is in the way, or that the first host has
    not started yet. After "lost" and "expelled" start the job again from its latest checkpoint.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"reason": self.reason})


class AuthenticationError(CoordinationError):
    """A key is missing, other users can read it, or it is not the key of the other side.

    What to do: `phalanx key` makes a key; copy that file to every host of the job with `scp -p`. `phalanx key
    --fingerprint` shows on each host whether the keys are the same. `chmod 600` makes a file yours alone.
    """


class CheckpointError(PhalanxError):
    """A checkpoint could not be written or read, or it does not fit the objects that load it.

    What to do: the message names the file, or the keys and shapes that differ. `phalanx checkpoint inspect PATH
    --verify` finds damaged files. `CheckpointManager.load(..., fallback=True)` takes the checkpoint before a damaged
    one.
    """


class DataError(PhalanxError):
    """A shard of a stream could not be read, or has another number of samples than was given.

    What to do: the message names the shard. If it was changed, remove the file `index=`, to count all shards again.
    """


class InternalError(PhalanxError):
    """Something that Phalanx guarantees did not hold. This is a bug of ours.

    What to do: please report it, with the whole message and the output of `phalanx doctor --json`.
    """


def _rebuild(cls: type[PhalanxError], message: str, fields: Mapping[str, Any]) -> PhalanxError:
    return cls(message, **fields)


if TYPE_CHECKING:

    class MismatchError(PhalanxError):
        """Ranks called different operations, or gave different shapes, dtypes or models. No tensor was changed.

        `calls` maps each rank to its own call, in words.

        What to do: the message shows the line of each rank. Let every rank call the same operation with the same dtype,
        size and options, in the same order. A call under `if rank == 0` is the usual cause.
        """

        calls: dict[int, str]

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None: ...

    class PeerLostError(PhalanxError):
        """A process of the group died, or left the group. `ranks` names which, in the group's numbering.

        What to do: look for that rank's own error; `phalanx run` prints it last. SIGKILL without an error usually means
        that memory ran out. To continue without a restart, put the training loop into `phalanx.elastic.run`.
        """

        ranks: tuple[int, ...]

        def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None: ...


def _define_torch_errors() -> None:
    """Create the two classes that are also torch's `DistBackendError`; this costs one import of torch, once."""
    try:
        from torch.distributed import DistBackendError
    except ImportError:  # a torch without torch.distributed, or no torch at all: the names still exist
        DistBackendError = RuntimeError  # type: ignore[misc,assignment]

    class MismatchError(PhalanxError, DistBackendError):
        """Ranks called different operations, or gave different shapes, dtypes or models. No tensor was changed.

        `calls` maps each rank to its own call, in words.

        What to do: the message shows the line of each rank. Let every rank call the same operation with the same dtype,
        size and options, in the same order. A call under `if rank == 0` is the usual cause.
        """

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None:
            super().__init__(message)
            self.calls = dict(calls or {})

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuild, (type(self), str(self), {"calls": self.calls}), self.__dict__

    class PeerLostError(PhalanxError, DistBackendError):
        """A process of the group died, or left the group. `ranks` names which, in the group's numbering.

        What to do: look for that rank's own error; `phalanx run` prints it last. SIGKILL without an error usually means
        that memory ran out. To continue without a restart, put the training loop into `phalanx.elastic.run`.
        """

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
