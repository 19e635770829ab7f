"""Ask the kernel which process is on the other side of a Unix socket (`SO_PEERCRED`)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """It is the process that connected, or that listens; `pid` is 0 where it lives in a pid namespace we can't see."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process to which a connected Unix socket leads."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(int(pid), int(uid))
