"""Where others find the agent: ranks that show it their memory, and `phalanx stacks`.

A socket without a file, named after this process and some random digits, so that nobody can take the name first. The
kernel vouches for the user on the other side; another user is turned away unheard. A visitor says one packet, with
descriptors alongside. The agent never waits for one.
"""

from __future__ import annotations

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
_QUEUE = 128  # how many may wait to be let in
_MAX_VISITORS = 64  # who says nothing while so many others come is shown out


@dataclass(frozen=True)
class Request:
    """What a visitor said and brought; `sock` leads back to it. The receiver closes both."""

    message: dict[str, Any]
    fds: tuple[int, ...]
    sock: socket.socket

    def close(self) -> None:
        """Let go of everything."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


class AgentSocket:
    """Open from construction; without a Linux underneath it stays shut, and `address` is empty."""

    def __init__(self) -> None:
        self.address = ""
        self.token = os.urandom(16).hex()
        self._visitors: OrderedDict[int, socket.socket] = OrderedDict()
        self._listener: socket.socket | None = None
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
        return () if self._listener is None else (self._listener.fileno(), *self._visitors)

    def read(self, fd: int) -> Request | None:
        """Take what arrived on `fd`: new visitors, or what one says. None where that is nothing, or nothing sensible.

        `fd` was one of `fds`; meanwhile the visitor may have been shown out, and another have come under its number.
        """
        assert self._listener is not None
        if fd == self._listener.fileno():
            self._admit(self._listener)
            return None
        return self._hear(self._visitors[fd]) if fd in self._visitors else None

    def close(self) -> None:
        """Nobody is heard any more."""
        for visitor in self._visitors.values():
            visitor.close()
        self._visitors.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _admit(self, listener: socket.socket) -> None:
        admitted = 0
        # Many at once, because another user of the host can fill the queue and keep the ranks out; not so many that a
        # visitor could be shown out before anybody has listened to it.
        for _ in range(_QUEUE):
            if admitted == _MAX_VISITORS // 2:
                return
            try:
                visitor, _ = listener.accept()
            except OSError:
                return
            if peer_of(visitor).uid != os.getuid():
                visitor.close()
                continue
            admitted += 1
            visitor.setblocking(False)
            self._visitors[visitor.fileno()] = visitor
            if len(self._visitors) > _MAX_VISITORS:
                self._visitors.popitem(last=False)[1].close()

    def _hear(self, visitor: socket.socket) -> Request | None:
        fds: Sequence[int] = ()
        try:
            data, fds, _, _ = socket.recv_fds(visitor, _MAX_PACKET_BYTES, _MAX_FDS)
        except BlockingIOError:
            return None  # it has yet to say something
        except OSError:
            data = b""
        del self._visitors[visitor.fileno()]
        try:
            for fd in fds:
                os.set_inheritable(fd, False)
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError
        except (OSError, ValueError, RecursionError):  # it went without a word, or speaks another language
            for fd in fds:
                os.close(fd)
            visitor.close()
            return None
        return Request(message, tuple(fds), visitor)
