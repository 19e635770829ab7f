"""Name the places of a recovery at which a test can let a fault strike."""

from __future__ import annotations

from collections.abc import Callable

COMMIT, LOST, LEAVE, MEET, AGREE, REBIND, HAND_OVER, RESTORE, FINISH = POINTS = (
    "commit",  # a step is done, and is about to be committed
    "lost",  # a peer was lost, and is about to be reported
    "leave",  # the next generation is known, and the old group is about to be left
    "meet",  # the new group is about to be formed
    "agree",  # it is there, and the ranks are about to say which step they have completed
    "rebind",  # wrappers and optimizers are about to move to the new group
    "hand over",  # state is about to be sent to the ranks that have none
    "restore",  # it has arrived, and each rank is about to go back to its own random state
    "finish",  # the function has returned, and the ranks are about to agree that it has on all
)

_listener: Callable[[str], None] | None = None


def listen(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with the name of every point from now on; None stops that."""
    global _listener
    _listener = listener


def reached(point: str) -> None:
    """Note that this rank has got to the point `name`."""
    if _listener is not None:
        _listener(point)
