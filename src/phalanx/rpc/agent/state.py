"""The states of an agent, and from which to which it goes.

STARTING   it joins, and calls of others wait    ──► RUNNING, ENDING, CLOSED
RUNNING    calls run                             ──► LEAVING, ENDING, CLOSED
LEAVING    all have come to the end: others may
           go now without being lost             ──► ENDING, CLOSED
ENDING     no new calls, those under way fail    ──► CLOSED
CLOSED     nothing is left; a fork of an agent is so from the beginning
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """`State` is that of an agent."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDING = "ending"
    CLOSED = "closed"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.RUNNING, State.ENDING, State.CLOSED}),
    State.RUNNING: frozenset({State.LEAVING, State.ENDING, State.CLOSED}),
    State.LEAVING: frozenset({State.ENDING, State.CLOSED}),
    State.ENDING: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}
