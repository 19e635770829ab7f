"""Name the points of an elastic job, in training and in a recovery, at which a test can inject a fault."""

from __future__ import annotations

from collections.abc import Callable

COMMIT, LOST, LEAVE, FORM, AGREE, REBIND, TRANSFER, RESTORE, FINISH = POINTS = (
    "commit",  # a step or an epoch is complete, and is about to be committed
    "lost",  # a peer was lost, and is about to be reported
    "leave",  # the next generation is known, and the rank is about to leave the old group
    "form",  # the ranks are about to form the new group
    "agree",  # the new group is formed, and the ranks are about to report the step that they have completed
    "rebind",  # wrappers and optimizers are about to move to the new group
    "transfer",  # the rank is about to send state to the ranks that have none
    "restore",  # the state has arrived, and each rank is about to restore its own random state
    "finish",  # the function has returned, and the ranks are about to wait until it has returned on all of them
)

_listener: Callable[[str], None] | None = None


def listen(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with the name of each point that is reached from now on; None removes the listener."""
    global _listener
    _listener = listener


def reached(point: str) -> None:
    """Report to the listener that this rank has reached `point`."""
    if _listener is not None:
        _listener(point)
