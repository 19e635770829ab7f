"""Notify the first host, from the zygote of another host, that the zygote's agent was killed.

Without this, the first host detects the loss only after a timeout, because a closed connection may be reopened.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx.errors import PhalanxError

_NOTIFY_TIMEOUT_S = 15.0  # by then the first host has detected the loss itself, after its own timeout


def describe_membership(client: Client) -> dict[str, Any]:
    """Return the membership that the zygote passes to `notify_first_host`."""
    key = str(client.key) if client.key is not None else ""
    return {"address": str(client.address), "key": key, "member": client.member, "job": client.job}


def notify_first_host(membership: Mapping[str, Any], agent: int) -> None:
    """Report the agent's death to the coordinator; never raise."""
    key = Key.parse(membership["key"]) if membership["key"] else None
    with (
        contextlib.suppress(PhalanxError, OSError, ValueError),
        Client(membership["address"], key, timeout=_NOTIFY_TIMEOUT_S, job=membership["job"]) as client,
    ):
        client.join({"kind": "orphaned", "host": socket.gethostname()}, watch=())
        client.expel(membership["member"], f"`phalanx run` (pid {agent}) was killed there, and its ranks with it")
        client.leave()
