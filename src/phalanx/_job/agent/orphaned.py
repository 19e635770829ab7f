"""Let the zygote of a joining host notify the first host of its agent's death, so that the first host need not wait.

A closed connection proves nothing: an interrupted one closes, too, and reconnects. The zygote sees the death itself.
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
    """Return the data that the zygote needs for `notify_first_host`."""
    key = str(client.key) if client.key is not None else ""
    return {"address": str(client.address), "key": key, "member": client.member, "job": client.job}


def notify_first_host(membership: Mapping[str, Any], agent: int) -> None:
    """Tell the coordinator that the agent has died; never raises if that fails."""
    key = Key.parse(membership["key"]) if membership["key"] else None
    with (
        contextlib.suppress(PhalanxError, OSError, ValueError),
        Client(membership["address"], key, timeout=_TELL_S, job=membership["job"]) as client,
    ):
        client.join({"kind": "orphaned", "host": socket.gethostname()}, watch=())
        client.expel(membership["member"], f"`phalanx run` (pid {agent}) was killed there, and its ranks with it")
        client.leave()
