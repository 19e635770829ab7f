"""A call whose ranks are on several hosts: the call goes out, and outcomes come back, through the job's coordinator.

rank 0, on the caller's host     puts the call there
ranks of other hosts             take it, and put their outcomes there
the caller's agent               takes those at the end, into the folder where the caller looks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.coordination.launchers import COORDINATOR

if TYPE_CHECKING:
    from phalanx.coordination.client import Client

_PREFIX = "launch/call/"
_OUTCOMES = "outcome-"
_PART_BYTES = 1 << 20


def connect(environ: Mapping[str, str]) -> Client | None:
    """A connection to the coordinator of this rank's job; None in a job on one host."""
    told = environ.get("PHALANX_STORE", "")
    if not told.startswith(COORDINATOR):
        return None
    from phalanx.coordination.client import Client
    from phalanx.coordination.key import Key

    place = json.loads(Path(told.removeprefix(COORDINATOR)).read_bytes())
    return Client(place["address"], Key.parse(place["key"]) if place["key"] else None)


def put(client: Client, name: str, data: bytes) -> None:
    """Store `data`, in parts; it is there when all is."""
    count = 0
    for at in range(0, len(data), _PART_BYTES):
        client.set(f"{_PREFIX}{name}/{count}", data[at : at + _PART_BYTES])
        count += 1
    client.set(f"{_PREFIX}{name}", str(count).encode())


def take(client: Client, name: str) -> bytes:
    """What was put under that name; waits until it is there."""
    count = int(client.get(f"{_PREFIX}{name}"))
    return b"".join(client.get(f"{_PREFIX}{name}/{i}") for i in range(count))


def forget(client: Client, name: str) -> None:
    """Of an attempt before this one."""
    client.delete_key(f"{_PREFIX}{name}")


def fetch_outcomes(client: Client, folder: str) -> None:
    """Write the outcomes of the ranks of other hosts into `folder`."""
    for key in client.list_keys(f"{_PREFIX}{_OUTCOMES}"):
        name = key.removeprefix(_PREFIX)
        if "/" not in name:
            Path(folder, name).write_bytes(take(client, name))
