"""Let the zygote of a joining host tell the first host that its agent was killed, so that the first host need not wait.

A connection that closes proves nothing: one that was cut closes, too, and comes again. The zygote knows.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx.errors import PhalanxError

_TELL_S = 15.0  # if the first host cannot be reached in that time, it finds out by our silence


def describe_membership(client: Client) -> dict[str, Any]:
    """Return what the zygote must know for `tell_first_host`, as plain data."""
    key = str(client.key) if client.key is not None else ""
    return {"address": str(client.address), "key": key, "member": client.member, "job": client.job}


def tell_first_host(membership: Mapping[str, Any], agent: int) -> None:
    """Tell the coordinator that the agent has died; never raises if that fails."""
    key = Key.parse(membership["key"]) if membership["key"] else None
    with (
        contextlib.suppress(PhalanxError, OSError, ValueError),
        Client(membership["address"], key, timeout=_TELL_S, job=membership["job"]) as client,
    ):
        client.join({"kind": "orphaned", "host": socket.gethostname()}, watch=())
        client.expel(membership["member"], f"`phalanx run` (pid {agent}) was killed there, and its ranks with it")
        client.leave()
