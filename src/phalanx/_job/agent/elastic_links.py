"""Hold the connections of an elastic job's ranks to their agent, which carry messages, and decide nothing.

    rank ──{"kind": "elastic", …}──▶ agent             the first message, which opens the connection
    rank ◀──welcome, a descriptor── agent              `phalanx.elastic.channel.outlive_zygote`
    rank ──lost, regrouped, progress, …──▶ agent
    rank ◀──generation, joining, end── agent

The agent never waits: messages to a slow rank are queued.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from phalanx._base.ipc.channel import Channel


@dataclass(frozen=True)
class _Link:
    slot: int
    pid: int
    channel: Channel


class ElasticLinks:
    """`ElasticLinks` keeps a connection for each slot: the number that a rank was started with, and its process."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}  # by descriptor
        self._leashes: dict[int, list[int]] = {}  # by process: the writing ends of the pipes with which it ends

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll for messages."""
        return tuple(self._links)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the descriptors to poll until they can be written."""
        return tuple(fd for fd, link in self._links.items() if link.channel.waiting)

    def admit(self, channel: Channel, slot: int, pid: int, welcome: dict[str, Any]) -> None:
        """Accept the connection of a process, and send it `welcome`; a connection that it had before is closed."""
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            self._close(fd)
        self._links[channel.fileno()] = _Link(slot, pid, channel)
        theirs, ours = os.pipe()
        # closing the pipe of an earlier connection would kill the process
        self._leashes.setdefault(pid, []).append(ours)
        try:
            channel.put(welcome, [theirs])
        finally:
            os.close(theirs)

    def send(self, slot: int, message: dict[str, Any]) -> bool:
        """Send a message to the rank with this number; return False if it has no connection."""
        links = [link for link in self._links.values() if link.slot == slot]
        for link in links:
            link.channel.put(message)
        return bool(links)

    def send_waiting(self, fd: int) -> None:
        """Send the queued messages of the rank on descriptor `fd`, which is writable."""
        if fd in self._links:
            self._links[fd].channel.send_some()

    def read(self, fd: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the messages that have come on `fd`, each with slot and process. Close a connection that has ended.

        A message that is malformed, because the script has found the descriptor, is ignored.
        """
        link = self._links.get(fd)
        if link is None:
            return []
        taken = link.channel.receive_available()
        for message in taken:
            message.close()
        if link.channel.gone:
            self._close(fd)
        return [(link.slot, link.pid, message.content) for message in taken]

    def drop(self, pid: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the last messages of a process that has ended, and close its connection."""
        said: list[tuple[int, int, dict[str, Any]]] = []
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            said += self.read(fd)
            if fd in self._links:
                self._close(fd)
        for leash in self._leashes.pop(pid, []):
            os.close(leash)
        return said

    def close(self) -> None:
        """Close all connections; the processes have ended, or end because of this."""
        for fd in tuple(self._links):
            self._close(fd)
        for leash in [leash for leashes in self._leashes.values() for leash in leashes]:
            os.close(leash)
        self._leashes.clear()

    def _close(self, fd: int) -> None:
        self._links.pop(fd).channel.close()
