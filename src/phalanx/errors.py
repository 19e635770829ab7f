"""Define the exceptions that Phalanx raises at run time; each is named after the cause of the failure.

    RuntimeError
    └── PhalanxError
        ├── ClosedError        you closed it: the group was destroyed, or this process is a fork of a rank
        ├── MismatchError      ranks disagree: different operation, shape, dtype or model     (also DistBackendError)
        ├── PeerLostError      a peer died or left                                          (also DistBackendError)
        ├── DeadlineError      time ran out                                              (also TimeoutError)
        ├── LaunchError        the job could not be started, or one of its ranks failed
        ├── CoordinationError  the job's coordinator cannot be reached, has ended, or has expelled this process
        │   └── AuthenticationError  a key is missing, unsafe, or differs from the coordinator's
        ├── CheckpointError    a checkpoint could not be written, or cannot be used
        ├── DataError          a shard of a stream could not be read, or is damaged
        └── InternalError      our bug: please report it

A wrong call (an argument that is invalid whatever other ranks do) raises `ValueError` or `TypeError` on entry instead.

`MismatchError` and `PeerLostError` are also `torch.distributed.DistBackendError`, which PyTorch's users already catch.
These two are created on first use, because the launcher raises errors of this module and never imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any


def message_of(error: BaseException) -> str:
    """Return the text of an exception, whose class may be a user's; never raises."""
    try:
        return str.__str__(str(error))  # an instance of a subclass of str might not be picklable
    except BaseException as second:
        return f"(no message: __str__ raised {class_of(second)})"


def class_of(error: BaseException) -> str:
    """Return the name of an exception's class, with its module; never raises."""
    try:
        return f"{type(error).__module__}.{type(error).__qualname__}"
    except BaseException:  # a user's metaclass may raise anything
        return type.__dict__["__name__"].__get__(type(error))  # type: ignore[no-any-return]


def summary_of(error: BaseException) -> str:
    """Return a summary such as `ValueError: too large`, as in the last line of a traceback; never raises."""
    return f"{class_of(error).rpartition('.')[2]}: {message_of(error)}"


class PhalanxError(RuntimeError):
    """An operation failed, and the message says where, why and what to do. All classes of this page derive from this.

    If an operation of a group failed, these fields hold the facts: `operation` ('all_reduce'), `seq` (its number),
    `group` (its name), `rank` (the number of this process in the group), `call_site` ('train.py:88') and `positions`
    (what each other rank did last, for the ranks that the message mentions). An unknown text is empty, an unknown
    number is 0, and an unknown rank is -1.

    What to do: read the last line of the message. To catch every error of this page, catch this class.
    """

    operation = ""
    seq = 0
    group = ""
    rank = -1
    call_site = ""
    positions: Mapping[int, str] = MappingProxyType({})


class ClosedError(PhalanxError):
    """This process closed the group, its memory or the job before the call; or it is a fork of a rank.

    What to do: move the call before `destroy_process_group`, or before the end of `with phalanx.init()`. In a child
    that you have forked, call `init_process_group` again or leave communication to the parent.
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
        return _rebuild, (type(self), str(self), {"exit_code": self.exit_code}), self.__dict__


class CoordinationError(PhalanxError):
    """The job's coordinator cannot be reached, has ended, or no longer counts this process as a member.

    `reason` is one of these, or empty:

    - "unreachable": nothing answers at the address.
    - "stranger": something else answers there, or a coordinator of another version.
    - "another job": the coordinator of another job answers there.
    - "lost": the coordinator answered before, and no longer does.
    - "expelled": the coordinator no longer counts this process as a member.
    - "taken": the coordinator cannot listen, because another process uses its address.

    What to do: "unreachable" means that the address is wrong, that a firewall is in the way, or that the first host has
    not started yet. After "lost" and "expelled" start the job again from its latest checkpoint.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"reason": self.reason}), self.__dict__


class AuthenticationError(CoordinationError):
    """A key is missing, other users can read it, or it differs from the key of the other side.

    What to do: `phalanx key` makes a key; copy that file to every host of the job with `scp -p`. `phalanx key
    --fingerprint` shows on each host whether the keys are the same. `chmod 600` makes a file yours alone.
    """


class CheckpointError(PhalanxError):
    """A checkpoint could not be written or read, or it does not fit the objects that load it.

    What to do: the message names the file, or the keys and shapes that differ. `phalanx checkpoint inspect PATH
    --verify` finds damaged files. `CheckpointManager.load(..., fallback=True)` loads the checkpoint before the
    damaged one.
    """


class DataError(PhalanxError):
    """A shard of a stream could not be read, or has a different number of samples than given.

    What to do: the message names the shard. If the shard was changed, remove the index file (`index=`), so that all
    shards are counted again.
    """


class InternalError(PhalanxError):
    """A guarantee of Phalanx did not hold. This is a bug in Phalanx.

    What to do: please report it, with the whole message and the output of `phalanx doctor --json`.
    """


def _rebuild(cls: type[PhalanxError], message: str, fields: Mapping[str, Any]) -> PhalanxError:
    return cls(message, **fields)


if TYPE_CHECKING:

    class MismatchError(PhalanxError):
        """Ranks called different operations, or passed different shapes, dtypes or models. No tensor was changed.

        `calls` maps each rank to a description of its call.

        What to do: the message shows the line of each rank. Let every rank call the same operation with the same dtype,
        size and options, in the same order. A call under `if rank == 0` is the usual cause.
        """

        calls: dict[int, str]

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None: ...

    class PeerLostError(PhalanxError):
        """A process of the group died, or left the group. `ranks` lists the lost ranks, in the group's numbering.

        What to do: look for that rank's own error; `phalanx run` prints it last. SIGKILL without an error usually means
        that memory ran out. To continue without a restart, put the training loop into `phalanx.elastic.run`.
        """

        ranks: tuple[int, ...]

        def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None: ...


def _define_torch_errors() -> None:
    """Create the two classes that are also torch's `DistBackendError`; this imports torch."""
    try:
        from torch.distributed import DistBackendError
    except ImportError:  # torch without torch.distributed, or no torch: the names still exist
        DistBackendError = RuntimeError  # type: ignore[misc,assignment]

    class MismatchError(PhalanxError, DistBackendError):
        """Ranks called different operations, or passed different shapes, dtypes or models. No tensor was changed.

        `calls` maps each rank to a description of its call.

        What to do: the message shows the line of each rank. Let every rank call the same operation with the same dtype,
        size and options, in the same order. A call under `if rank == 0` is the usual cause.
        """

        def __init__(self, message: str, *, calls: Mapping[int, str] | None = None) -> None:
            super().__init__(message)
            self.calls = dict(calls or {})

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuild, (type(self), str(self), {"calls": self.calls}), self.__dict__

    class PeerLostError(PhalanxError, DistBackendError):
        """A process of the group died, or left the group. `ranks` lists the lost ranks, in the group's numbering.

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


_defining = threading.RLock()  # importing torch may look up these names, too


def __getattr__(name: str) -> Any:
    if name in ("MismatchError", "PeerLostError"):
        with _defining:
            if name not in globals():  # another thread may have defined both
                _define_torch_errors()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
