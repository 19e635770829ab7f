"""Carry messages between an elastic job's ranks and their agent.

    rank ──{"kind": "elastic", …}──▶ agent             the first message on a new connection
    rank ◀──welcome, a descriptor── agent              `phalanx.elastic.channel.outlive_zygote`
    rank ──outlives, lost, regrouped, waiting, failed, finished──▶ agent
    rank ◀──generation, joining, wait, end, leave, no generation── agent

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
    """`ElasticLinks` owns the connections of the elastic ranks; each belongs to a slot and a process."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}  # by descriptor
        # by pid: the write ends of its pipes; the kernel kills the process when one is closed
        self._death_pipes: dict[int, list[int]] = {}

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll for messages."""
        return tuple(self._links)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the descriptors to poll for writing, because messages are queued."""
        return tuple(fd for fd, link in self._links.items() if link.channel.waiting)

    def accept(self, channel: Channel, slot: int, pid: int, welcome: dict[str, Any]) -> None:
        """Accept the connection of a process, close its earlier ones, and send it `welcome`."""
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            self._close(fd)
        self._links[channel.fileno()] = _Link(slot, pid, channel)
        theirs, ours = os.pipe()
        # closing the pipe of an earlier connection would kill the process
        self._death_pipes.setdefault(pid, []).append(ours)
        try:
            channel.put(welcome, [theirs])
        finally:
            os.close(theirs)

    def send(self, slot: int, message: dict[str, Any]) -> bool:
        """Send a message to the rank in this slot; return False if it has no connection."""
        links = [link for link in self._links.values() if link.slot == slot]
        for link in links:
            link.channel.put(message)
        return bool(links)

    def send_waiting(self, fd: int) -> None:
        """Send queued messages to the rank on descriptor `fd`, which is writable."""
        if fd in self._links:
            self._links[fd].channel.send_some()

    def read(self, fd: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the messages that have arrived on `fd`, each with its slot and pid; close a connection that has ended.

        Malformed messages, which a script may send if it finds the descriptor, are ignored.
        """
        link = self._links.get(fd)
        if link is None:
            return []
        received = link.channel.receive_available()
        for message in received:
            message.close()
        if link.channel.gone:
            self._close(fd)
        return [(link.slot, link.pid, message.content) for message in received]

    def drop(self, pid: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Return the last messages of a process that has exited, and close its connection."""
        messages: list[tuple[int, int, dict[str, Any]]] = []
        for fd in [fd for fd, link in self._links.items() if link.pid == pid]:
            messages += self.read(fd)
            if fd in self._links:
                self._close(fd)
        for pipe in self._death_pipes.pop(pid, []):
            os.close(pipe)
        return messages

    def close(self) -> None:
        """Close all connections and pipes; the kernel kills ranks that have not exited."""
        for fd in tuple(self._links):
            self._close(fd)
        for pipe in [pipe for pipes in self._death_pipes.values() for pipe in pipes]:
            os.close(pipe)
        self._death_pipes.clear()

    def _close(self, fd: int) -> None:
        self._links.pop(fd).channel.close()
