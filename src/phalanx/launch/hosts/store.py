"""How ranks of a job on several hosts find its store: a file without a name that says where the coordinator is.

It holds the job's key: so it is no variable, which every program that a rank starts would inherit, but memory of the
agent, to which only processes of this user are led.
"""

from __future__ import annotations

import json
import os

from phalanx.coordination.launchers import COORDINATOR
from phalanx.symmetric_memory.memfd import create


def create_store(address: str, key: str) -> tuple[int, str]:
    """A descriptor of such a file, and what PHALANX_STORE says; `key` is empty for a path on this host."""
    fd = create("phalanx-coordinator")
    os.pwrite(fd, json.dumps({"address": address, "key": key}).encode(), 0)
    return fd, f"{COORDINATOR}/proc/{os.getpid()}/fd/{fd}"
