"""The errors for calls that no transport can carry out: on a group that is gone here, and out of a signal handler."""

from __future__ import annotations

from phalanx.errors import ClosedError, PhalanxError


def nested(what: str, group: str, rank: int) -> PhalanxError:
    """The error for an operation of a signal handler that could only end after the one that it interrupted."""
    return PhalanxError(
        f"{what} in group {group!r} on rank {rank}: it was called in a signal handler that interrupted an operation of "
        "the same group, which goes on when the handler returns: it would wait for itself.\n"
        "Let the handler set a flag, and look at it between two steps, on every rank; or call with async_op=True in "
        "the handler, which queues the operation behind the interrupted one, and wait after the handler."
    )


def closed(group: str) -> ClosedError:
    """The error for a group that this process has left."""
    return ClosedError(
        f"group {group!r}: it was destroyed in this process, or this process was forked from a rank.\n"
        "Create the group again, or start processes that communicate with spawn."
    )
