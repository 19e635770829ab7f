"""`AgentSocket` is the socket at which the agent serves its ranks, `phalanx stacks` and `phalanx top`.

The socket is an abstract Unix socket. Its name has the pid and random digits, so that no other process can bind the
name first. The kernel identifies the client's user. A client sends one message (`phalanx._base.ipc.channel`). The agent
never waits for a message.

    client of another user               closed unread
    no whole message yet                 stays open, with 63 others; then the oldest is closed
    invalid message, or without token    closed                                               each is reported, once
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel, Peer, peer_of

PREFIX = "phalanx-agent-"

_MAX_BYTES = 1 << 17  # of a message
_MAX_FDS = 2
_MAX_QUEUED = 256  # unread messages after which a client is considered stuck
_QUEUE = 128  # connections that may wait to be accepted
_MAX_PENDING = 64  # accepted connections without a whole message; with more, the oldest is closed


@dataclass(frozen=True)
class ClientRequest:
    """A `ClientRequest` is a client's message with its descriptors, and the channel for the answer; it owns both."""

    message: dict[str, Any]
    fds: tuple[int, ...]
    channel: Channel

    def close(self) -> None:
        """Close the channel and the descriptors."""
        self.channel.close()
        for fd in self.fds:
            os.close(fd)


class AgentSocket:
    """An `AgentSocket` listens as soon as it is created. It works only on Linux; elsewhere `address` is empty."""

    def __init__(self) -> None:
        self.address = ""
        self.token = os.urandom(16).hex()
        self._connections: OrderedDict[int, Channel] = OrderedDict()
        self._listener: socket.socket | None = None
        self._reported: set[str] = set()
        self._notices: list[str] = []
        if sys.platform != "linux":
            return
        name = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            self._listener = listen(name, _QUEUE)
        except OSError:  # a sandbox without Unix sockets: nobody can inspect the job
            return
        self.address = f"{name}:{self.token}"

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll."""
        return () if self._listener is None else (self._listener.fileno(), *self._connections)

    def read(self, fd: int) -> ClientRequest | None:
        """Accept new connections or read a request on `fd`. Return None if there is no valid request.

        `fd` was one of `fds`; that connection may have been closed since, and the number reused.
        """
        assert self._listener is not None
        if fd == self._listener.fileno():
            self._admit(self._listener)
            return None
        return self._read_request(self._connections[fd]) if fd in self._connections else None

    def has_token(self, request: ClientRequest) -> bool:
        """Return whether the sender has the job's token, as the job's ranks do; otherwise record a notice."""
        given = request.message.get("token")
        if isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return True
        self._notice_unheard("token", request.channel.peer, "has sent a message without the job's token")
        return False

    def notice(self, kind: str, text: str) -> None:
        """Record a notice for the user that a client was refused; only the first of each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            self._notices.append(text)

    def _notice_unheard(self, kind: str, peer: Peer, what: str) -> None:
        who = f"a process of user {peer.uid} (pid {peer.pid})"
        self.notice(kind, f"{who} {what}, and was refused. The job continues; later refusals are not reported")

    def take_notices(self) -> list[str]:
        """Return the notices since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _admit(self, listener: socket.socket) -> None:
        admitted = 0
        # Accept many at once, because another user can fill the queue, which blocks the ranks; but so few that every
        # connection is read before it can be closed.
        for _ in range(_QUEUE):
            if admitted == _MAX_PENDING // 2:
                return
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            peer = peer_of(connection)
            if peer.uid != os.getuid():
                self._notice_unheard("user", peer, "has connected to the job of another user")
                connection.close()
                continue
            admitted += 1
            self._connections[connection.fileno()] = self._open(connection)
            if len(self._connections) > _MAX_PENDING:
                oldest = self._connections.popitem(last=False)[1]
                self._notice_unheard(
                    "silent", oldest.peer, f"has opened a connection and sends nothing, like {_MAX_PENDING} others"
                )
                oldest.close()

    @staticmethod
    def _open(connection: socket.socket) -> Channel:
        return Channel(connection, max_bytes=_MAX_BYTES, max_fds=_MAX_FDS, max_queued=_MAX_QUEUED)

    def _read_request(self, channel: Channel) -> ClientRequest | None:
        messages = channel.receive_available(limit=1)
        if not (messages or channel.gone or channel.is_garbled):
            return None  # incomplete
        del self._connections[channel.fileno()]
        if messages:
            return ClientRequest(messages[0].content, messages[0].fds, channel)
        if channel.is_garbled:
            self._notice_unheard("garbage", channel.peer, "has sent an invalid message")
        channel.close()
        return None
