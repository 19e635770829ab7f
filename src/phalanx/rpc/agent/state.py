"""`AgentState` lists the states of an agent, and `TRANSITIONS` what may follow each.

STARTING   joins; calls of other workers wait       ──► RUNNING, ENDING, CLOSED
RUNNING    calls run                                ──► LEAVING, ENDING, CLOSED
LEAVING    all workers have reached shutdown: from
           now on others leave without being lost   ──► ENDING, CLOSED
ENDING     new calls are refused, pending ones fail ──► CLOSED
CLOSED     all resources are released; a forked copy of an agent starts here
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class AgentState(enum.Enum):
    """`AgentState` is the state of an agent."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDING = "ending"
    CLOSED = "closed"


TRANSITIONS: Mapping[AgentState, frozenset[AgentState]] = {
    AgentState.STARTING: frozenset({AgentState.RUNNING, AgentState.ENDING, AgentState.CLOSED}),
    AgentState.RUNNING: frozenset({AgentState.LEAVING, AgentState.ENDING, AgentState.CLOSED}),
    AgentState.LEAVING: frozenset({AgentState.ENDING, AgentState.CLOSED}),
    AgentState.ENDING: frozenset({AgentState.CLOSED}),
    AgentState.CLOSED: frozenset(),
}
