"""Query the kernel for the process at the other end of a Unix socket (`SO_PEERCRED`)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """A `Peer` is the process that connected, or that listens; `pid` is 0 if its pid namespace is not visible."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end of a connected Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(int(pid), int(uid))
