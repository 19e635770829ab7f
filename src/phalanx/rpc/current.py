"""The agent of this process, if the process is a worker."""

from __future__ import annotations

from phalanx.errors import ClosedError
from phalanx.rpc.agent.agent import Agent

_agent: Agent | None = None


def set_agent(agent: Agent | None) -> None:
    """Set the agent that makes this process a worker; None for no agent."""
    global _agent
    _agent = agent


def is_set() -> bool:
    """Return whether this process is a worker."""
    return _agent is not None


def agent() -> Agent:
    """Return the agent that makes this process a worker.

    Raises:
        ClosedError: this process is not a worker.
    """
    if _agent is None:
        raise ClosedError(
            "RPC has not been initialized in this process, or was shut down. (Current RPC agent is not set! Did you "
            "initialize the RPC framework, e.g. by calling `rpc.init_rpc`?) Call phalanx.rpc.init_rpc first."
        )
    return _agent
