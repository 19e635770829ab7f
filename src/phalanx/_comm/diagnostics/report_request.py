"""Request a report of the run from the agent, which outlives the ranks and sees how each ends."""

from __future__ import annotations

from phalanx._base.ipc.agent import notify

KIND = "report"  # the kind of the message


def request_report(agent: str, folder: str) -> bool:
    """Ask the agent at `agent` ("name:token") to write a report to `folder` as it exits; return False if it is gone."""
    return notify(agent, KIND, folder=folder)
