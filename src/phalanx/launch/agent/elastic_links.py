"""The connections that ranks of an elastic job hold open to their agent: messages, and nothing decided.

    rank ──{"kind": "elastic", …}──▶ agent             the first packet, which opens the connection
    rank ◀──welcome, a descriptor── agent              `phalanx.coordination.elastic_link.outlive_zygote`
    rank ──lost, regrouped, progress, …──▶ agent
    rank ◀──generation, joining, end── agent

A packet is a message. The agent never waits: what a rank does not take yet is queued.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_MAX_PACKET_BYTES = 1 << 17
_MAX_AT_ONCE = 64  # a rank that floods us must not keep us from the rest
_MAX_QUEUED = 256  # a rank that takes none of so many messages is not going to


@dataclass
class _Link:
    seat: int
    pid: int
    sock: socket.socket
    queue: deque[bytes] = field(default_factory=deque)


class ElasticLinks:
    """By seat: the number that a rank was started with, and its process."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}  # by descriptor
        self._leashes: dict[int, list[int]] = {}  # pid -> writing ends of the pipes with which the process ends

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait on for messages."""
        return tuple(self._links)

    @property
    def waiting(self) -> tuple[int, ...]:
        """What to wait on for room."""
        return tuple(fd for fd, link in self._links.items() if link.queue)

    def admit(self, sock: socket.socket, seat: int, pid: int, welcome: dict[str, Any]) -> None:
        """Take over the connection of a process, and welcome it; one that it had before is closed."""
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            self._close(fd)
        sock.setblocking(False)
        self._links[sock.fileno()] = _Link(seat, pid, sock)
        theirs, ours = os.pipe()
        try:
            socket.send_fds(sock, [json.dumps(welcome).encode()], [theirs])
        except OSError:  # it has gone, which is seen elsewhere
            os.close(ours)
        else:
            self._leashes.setdefault(pid, []).append(ours)  # to close one of an earlier connection would be its death
        finally:
            os.close(theirs)

    def send(self, seat: int, message: dict[str, Any]) -> bool:
        """Send to the rank with this number; False where it has no connection."""
        data = json.dumps(message).encode()
        links = [link for link in self._links.values() if link.seat == seat]
        for link in links:
            if len(link.queue) < _MAX_QUEUED:
                link.queue.append(data)
            self._send_some(link)
        return bool(links)

    def send_waiting(self, fd: int) -> None:
        """Send what was queued for the rank on descriptor `fd`, which has room now."""
        if fd in self._links:
            self._send_some(self._links[fd])

    def read(self, fd: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the messages that have come on `fd`, each with seat and process; a closed connection is let go of."""
        link = self._links.get(fd)
        messages: list[tuple[int, int, dict[str, Any]]] = []
        while link is not None and len(messages) < _MAX_AT_ONCE:
            try:
                data = link.sock.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._close(fd)
                break
            try:
                message = json.loads(data)
                if isinstance(message, dict):
                    messages.append((link.seat, link.pid, message))
            except (ValueError, RecursionError):
                pass  # the script has found the descriptor
        return messages

    def drop(self, pid: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return what a process that has ended said last, before its connection is let go of."""
        said: list[tuple[int, int, dict[str, Any]]] = []
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            said += self.read(fd)
            if fd in self._links:
                self._close(fd)
        for leash in self._leashes.pop(pid, []):
            os.close(leash)
        return said

    def close(self) -> None:
        """Let go of all; the processes have ended, or end by this."""
        for fd in tuple(self._links):
            self._close(fd)
        for leash in [leash for leashes in self._leashes.values() for leash in leashes]:
            os.close(leash)
        self._leashes.clear()

    def _close(self, fd: int) -> None:
        self._links.pop(fd).sock.close()

    def _send_some(self, link: _Link) -> None:
        while link.queue:
            try:
                link.sock.send(link.queue[0])
            except BlockingIOError:
                return
            except OSError:
                link.queue.clear()  # it has gone; what it said last can still be read
                return
            link.queue.popleft()
