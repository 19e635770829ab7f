"""Carry a call to ranks on several hosts, and the outcomes back, through the job's coordinator.

rank 0, on the caller's host     puts the call there
ranks of other hosts             take it, and put their outcomes there
the caller's agent               takes those at the end, into the folder where the caller looks
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx._comm.rendezvous.launchers import COORDINATOR

if TYPE_CHECKING:
    from phalanx._comm.control.client import Client

_PREFIX = "launch/call/"
_OUTCOMES = "outcome-"
_PART_BYTES = 1 << 20


def connect(environ: Mapping[str, str]) -> Client | None:
    """Return a connection to the coordinator of this rank's job; None in a job on one host."""
    told = environ.get("PHALANX_STORE", "")
    if not told.startswith(COORDINATOR):
        return None
    from phalanx._comm.control.client import Client
    from phalanx._comm.control.key import Key
    from phalanx._comm.rendezvous.agent_file import read_store

    fd = os.open(told.removeprefix(COORDINATOR), os.O_RDONLY | os.O_CLOEXEC)
    try:
        address, key = read_store(fd)  # behind it may stand which hosts are lost
    finally:
        os.close(fd)
    return Client(address, Key.parse(key) if key else None)


def put(client: Client, name: str, data: bytes) -> None:
    """Store `data`, in parts; it is there when all is."""
    count = 0
    for at in range(0, len(data), _PART_BYTES):
        client.set(f"{_PREFIX}{name}/{count}", data[at : at + _PART_BYTES])
        count += 1
    client.set(f"{_PREFIX}{name}", str(count).encode())


def find_join_timeout(client: Client) -> float:
    """Return how long hosts of this job wait for each other, in seconds."""
    from phalanx._job.hosts.job_spec import KEY

    return float(json.loads(client.get(KEY))["join_timeout_s"])


def take(client: Client, name: str, timeout_s: float | None = None) -> bytes:
    """Return what was put under that name; wait until it is there, for the client's time-out by default."""
    count = int(client.get(f"{_PREFIX}{name}", timeout=client.timeout if timeout_s is None else timeout_s))
    return b"".join(client.get(f"{_PREFIX}{name}/{i}") for i in range(count))


def forget(client: Client, name: str) -> None:
    """Delete what was put under that name in an attempt before this one."""
    client.delete_key(f"{_PREFIX}{name}")


def fetch_outcomes(client: Client, folder: str) -> None:
    """Write the outcomes of the ranks of other hosts into `folder`."""
    for key in client.list_keys(f"{_PREFIX}{_OUTCOMES}"):
        name = key.removeprefix(_PREFIX)
        if "/" not in name:
            Path(folder, name).write_bytes(take(client, name))
