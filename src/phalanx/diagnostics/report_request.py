"""A rank's wish for a report of the run, told to the agent, which lives longer and sees the others' ends."""

from __future__ import annotations

import json
import socket

KIND = "report"  # of the message


def ask_for_report(agent: str, folder: str) -> bool:
    """Have the agent with address `agent` ("name:token") write a report into `folder` at its end; False: none hears."""
    name, _, token = agent.rpartition(":")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect(f"\0{name}")
            sock.send(json.dumps({"kind": KIND, "token": token, "folder": folder}).encode())
    except OSError:  # no agent any more, or another network namespace
        return False
    return True
