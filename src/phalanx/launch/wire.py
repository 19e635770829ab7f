"""Messages between agent and zygote: JSON with its length in front, file descriptors alongside."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_MAX_FDS = 8


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message and copies of `fds`; blocks while the peer's buffer is full.

    Raises:
        OSError: the peer is gone.
    """
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if fds:
        socket.send_fds(sock, [header], list(fds))
        sock.sendall(body)
    else:
        sock.sendall(header + body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors (close-on-exec, owned by the caller); None when the peer has gone."""
    try:
        header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        header += _receive_exactly(sock, _LENGTH.size - len(header)) if header else b""
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        body = _receive_exactly(sock, length)
    except ConnectionError:
        return None
    return (json.loads(body), fds) if len(body) == length else None


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := sock.recv(size - len(data))):
        data += chunk
    return bytes(data)
