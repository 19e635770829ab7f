"""Messages between agent and zygote: JSON with its length in front, file descriptors alongside."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_MAX_FDS = 8
_READ_BYTES = 1 << 16


class Channel:
    """The end of one who must never wait for the other: what the other does not take yet is queued.

    The zygote may be importing torch, be stopped, or itself wait for us to read. Waiting for it, we would hear neither
    it nor the user's signals.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._queue: deque[tuple[bytearray, list[int]]] = deque()
        self._received = bytearray()
        self._deaf = False
        self.gone = False

    def fileno(self) -> int:
        """Return what to wait on: for messages, and while `waiting` for room."""
        return self._sock.fileno()

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._queue)

    def put(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue one message and copies of `fds`, and send what the other takes now. Nothing happens if it is gone."""
        if self._deaf:
            return
        body = json.dumps(message).encode()
        self._queue.append((bytearray(_LENGTH.pack(len(body)) + body), [os.dup(fd) for fd in fds]))
        self.send_some()

    def send_some(self) -> None:
        """Send what the other takes without our waiting."""
        while self._queue:
            data, fds = self._queue[0]
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], passed)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:  # so many descriptors on their way that the system wants a pause
                    self._stop_sending()  # the other has gone; what it said before can still be read
                return
            while fds:  # they went with the first byte
                os.close(fds.pop())
            del data[:sent]
            if not data:
                self._queue.popleft()

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that have come; sets `gone` when there will be no more."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.gone = True
            self._stop_sending()
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        """Close the socket and what was not sent."""
        self._stop_sending()
        self._sock.close()

    def _stop_sending(self) -> None:
        self._deaf = True
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()


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
    """Return the next message and its descriptors (close-on-exec, owned by the caller); None when the peer has gone."""
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
