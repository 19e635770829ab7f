"""`State` lists the states of an agent, and `TRANSITIONS` what may follow each.

STARTING   it joins; calls of others wait           ──► RUNNING, ENDING, CLOSED
RUNNING    calls run                                ──► LEAVING, ENDING, CLOSED
LEAVING    all workers have reached shutdown: from
           now on others leave without being lost   ──► ENDING, CLOSED
ENDING     new calls are refused, pending ones fail ──► CLOSED
CLOSED     all resources are released; a forked copy of an agent starts here
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """`State` is the state of an agent."""

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
