"""A rank asks the agent for a report of the run, since the agent lives longer and sees how the others end."""

from __future__ import annotations

from phalanx._base.ipc.agent import tell

KIND = "report"  # the kind of the message


def ask_for_report(agent: str, folder: str) -> bool:
    """Have the agent at `agent` ("name:token") write a report into `folder` at its end; return False if none hears."""
    return tell(agent, KIND, folder=folder)
