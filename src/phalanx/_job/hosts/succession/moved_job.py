"""A job that has lost its first host has moved: earlier coordinators point to the host that leads the job now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from phalanx._comm.control.client import Client
from phalanx._job.hosts.control_channel import FIRST
from phalanx.errors import PhalanxError

MOVED_KEY = "launch/moved"  # the address of the host that leads the job, at a coordinator that no longer serves it
LEADER_KEY = "launch/first"  # the member that leads the job, at a coordinator that has taken over


class JobMovedError(Exception):
    """The leader of the job is at `address`, not where this host has looked for the job."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def find_moved(client: Client) -> str:
    """Return the leader's address if the job has moved from the coordinator of `client`; otherwise ""."""
    return client.get(MOVED_KEY).decode() if client.check([MOVED_KEY]) else ""


def point_to(local: str, address: str) -> None:
    """Redirect clients of this host's own coordinator to `address`."""
    with contextlib.suppress(PhalanxError), Client(local) as client:
        client.set(MOVED_KEY, address)


def join_as_follower(client: Client, facts: Mapping[str, Any]) -> int:
    """Join the job at the coordinator of `client`; return the member that leads the job.

    Raises:
        JobMovedError: that coordinator no longer serves the job.
        PhalanxError: that coordinator does not answer.
    """
    leader = int(client.get(LEADER_KEY)) if client.check([LEADER_KEY]) else FIRST
    client.join(facts, watch=(leader,))
    if moved := find_moved(client):  # that host has already redirected the members that joined earlier
        client.leave()
        raise JobMovedError(moved)
    return leader
