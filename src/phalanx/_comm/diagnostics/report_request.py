"""A rank requests a report of the run from the agent, which lives longer and sees how the others end."""

from __future__ import annotations

from phalanx._base.ipc.agent import notify

KIND = "report"  # the kind of the message


def request_report(agent: str, folder: str) -> bool:
    """Make the agent at `agent` ("name:token") write a report into `folder` at its end; return False if it is gone."""
    return notify(agent, KIND, folder=folder)
