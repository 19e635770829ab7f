"""Find the address of a Slurm node, whose name in Slurm may not resolve."""

from __future__ import annotations

import shutil
import socket
import subprocess

_PATIENCE_S = 10.0


def find_address(node: str) -> str:
    """Return the name of `node` if it resolves here; else the address that Slurm reports for it, or the name."""
    try:
        socket.getaddrinfo(node, None)
    except (OSError, UnicodeError):
        return _query_slurm(node) or node
    return node


def _query_slurm(node: str) -> str:
    if shutil.which("scontrol") is None:
        return ""
    command = ["scontrol", "-o", "show", "node", node]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = dict(word.split("=", 1) for word in answer.stdout.split() if "=" in word)
    return words.get("NodeAddr", "")
