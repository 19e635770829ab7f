"""Where others find the agent: ranks that show it their memory, and `phalanx stacks`.

A socket without a file, named after this process and some random digits, so that nobody can take the name first. The
kernel vouches for the user on the other side; a connection of another user is closed before anything is read from it.
A client sends one packet, with descriptors alongside. The agent never waits for one.

    another user                       closed unread
    no packet                          may wait, with 63 others; the oldest makes room
    no message, or without the token   closed                                            each is told, once
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.symmetric_memory.peer import peer_of

PREFIX = "phalanx-agent-"

_MAX_PACKET_BYTES = 1 << 17
_MAX_FDS = 2
_QUEUE = 128  # connections that may wait to be accepted
_MAX_PENDING = 64  # accepted and without a packet yet; beyond that the oldest is closed


@dataclass(frozen=True)
class Request:
    """A client's packet and descriptors; `sock` is for the answer. The receiver closes all."""

    message: dict[str, Any]
    fds: tuple[int, ...]
    sock: socket.socket

    def close(self) -> None:
        """Let go of everything."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


class AgentSocket:
    """Listens from construction on; on other systems than Linux it never does, and `address` is empty."""

    def __init__(self) -> None:
        self.address = ""
        self.token = os.urandom(16).hex()
        self._connections: OrderedDict[int, socket.socket] = OrderedDict()
        self._listener: socket.socket | None = None
        self._told: set[str] = set()
        self._notices: list[str] = []
        if sys.platform != "linux":
            return
        name = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listener.bind(f"\0{name}")
            listener.listen(_QUEUE)
        except OSError:  # a sandbox without Unix sockets: the job runs, unobserved
            listener.close()
            return
        self._listener = listener
        self.address = f"{name}:{self.token}"

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait on."""
        return () if self._listener is None else (self._listener.fileno(), *self._connections)

    def read(self, fd: int) -> Request | None:
        """Take what arrived on `fd`: new connections, or a request. None where that is nothing, or no valid request.

        `fd` was one of `fds`; meanwhile that connection may have been closed, and another have its number.
        """
        assert self._listener is not None
        if fd == self._listener.fileno():
            self._admit(self._listener)
            return None
        return self._read_request(self._connections[fd]) if fd in self._connections else None

    def has_token(self, request: Request) -> bool:
        """Whether who sent it has the job's token, as its ranks do; who has not is told of."""
        given = request.message.get("token")
        if isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return True
        self._notice_unheard("token", request.sock, "has sent a message without the job's token")
        return False

    def notice(self, kind: str, text: str) -> None:
        """Somebody was not heard, of whom the user is to know; once for each kind, however often it happens."""
        if kind not in self._told:
            self._told.add(kind)
            self._notices.append(text)

    def _notice_unheard(self, kind: str, sock: socket.socket, what: str) -> None:
        peer = peer_of(sock)
        who = f"a process of user {peer.uid} (pid {peer.pid})"
        self.notice(kind, f"{who} {what}. It is not heard, and the job goes on; no more is said of such")

    def take_notices(self) -> list[str]:
        """Return what the user is to know, and was not told yet."""
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """Close the socket and all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _admit(self, listener: socket.socket) -> None:
        admitted = 0
        # Many at once, because another user of the host can fill the queue and keep the ranks out; not so many that a
        # connection could be closed before it was read from.
        for _ in range(_QUEUE):
            if admitted == _MAX_PENDING // 2:
                return
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if peer_of(connection).uid != os.getuid():
                self._notice_unheard("user", connection, "has connected to the job of another user")
                connection.close()
                continue
            admitted += 1
            connection.setblocking(False)
            self._connections[connection.fileno()] = connection
            if len(self._connections) > _MAX_PENDING:
                oldest = self._connections.popitem(last=False)[1]
                self._notice_unheard(
                    "silent", oldest, f"has opened a connection and sends nothing, like {_MAX_PENDING} others"
                )
                oldest.close()

    def _read_request(self, connection: socket.socket) -> Request | None:
        fds: Sequence[int] = ()
        try:
            data, fds, _, _ = socket.recv_fds(connection, _MAX_PACKET_BYTES, _MAX_FDS)
        except BlockingIOError:
            return None  # nothing has arrived yet
        except OSError:
            data = b""
        del self._connections[connection.fileno()]
        try:
            for fd in fds:
                os.set_inheritable(fd, False)
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError
        except (OSError, ValueError, RecursionError):  # it was closed without a packet, or sent something else
            if data:
                self._notice_unheard("garbage", connection, "has sent what is no message of Phalanx")
            for fd in fds:
                os.close(fd)
            connection.close()
            return None
        return Request(message, tuple(fds), connection)
