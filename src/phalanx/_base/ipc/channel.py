"""A `Channel` sends messages between processes of one host over a Unix socket: JSON and file descriptors.

Each message begins with its length.

    4 bytes   the number of bytes that follow (big-endian); the message's file descriptors come with them
    n bytes   a JSON object

The agent uses channels to its zygote, its ranks, and the commands that inspect a job. No method waits for the other
end, except `send` and `receive`: otherwise one peer could block the agent.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import wait_readable

_LENGTH = struct.Struct("!I")
_MAX_FDS = 8
_MAX_BYTES = 1 << 30
_AT_ONCE = 64  # messages read in a row: a peer that floods us must not delay the others
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelMessage(NamedTuple):
    """A `ChannelMessage` is a received JSON object, with file descriptors that the receiver owns (close-on-exec)."""

    content: dict[str, Any]
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Channel:
    """A `Channel` is one end of a connection. It owns the socket, whose other end may be stopped, hostile or gone.

    `max_bytes` and `max_fds` limit a received message; one that exceeds them ends the channel. `max_queued` limits the
    messages that are queued for a peer that does not receive; further messages are dropped.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_bytes: int = _MAX_BYTES,
        max_fds: int = _MAX_FDS,
        max_queued: int | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_bytes, self._max_fds, self._max_queued = max_bytes, max_fds, max_queued
        self._queue: deque[tuple[bytearray, list[int]]] = deque()
        self._received = bytearray()
        self._received_fds: list[int] = []
        self._expected = _LENGTH.size
        self.broken = False  # the other end no longer receives; its earlier messages can still be read
        self.gone = False  # no more messages will arrive
        self.is_garbled = False  # something arrived that is not a message
        self.has_lost_fds = False  # the kernel dropped descriptors: this process is at its limit

    def fileno(self) -> int:
        """Return the descriptor to poll for reading, and while `waiting` for writing as well."""
        return self._sock.fileno()

    @property
    def peer(self) -> Peer:
        """Return the process at the other end."""
        return peer_of(self._sock)

    @property
    def waiting(self) -> bool:
        """Return whether unsent messages are queued."""
        return bool(self._queue)

    # -- sending -------------------------------------------------------------------------------------------------

    def put(self, content: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message with `fds`; queue the part that the socket does not accept, with copies of the descriptors.

        Do nothing if the other end is gone, or `max_queued` messages are queued.

        Raises:
            OSError: this process has no free descriptors for the copies; nothing was sent.
        """
        if self.broken or len(self._queue) == self._max_queued:
            return
        body = json.dumps(content).encode()
        data = bytearray(_LENGTH.pack(len(body)) + body)
        if self._queue or not self._send_part(data, fds):
            self._queue.append((data, _copy(fds)))
        elif data:
            self._queue.append((data, []))

    def send(self, content: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message, and wait until the system has accepted it.

        Raises:
            BrokenPipeError: the other end is gone.
        """
        self.put(content, fds)
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self.waiting:
            poll.poll()
            self.send_some()
        if self.broken:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def send_some(self) -> None:
        """Send queued messages as far as possible without waiting."""
        while self._queue:
            data, fds = self._queue[0]
            if not self._send_part(data, fds):
                return
            while fds:
                os.close(fds.pop())
            if not data:
                self._queue.popleft()

    def _send_part(self, data: bytearray, fds: Sequence[int]) -> bool:
        """Send as much of `data` as possible, and remove that part; return whether anything was sent.

        `fds` are sent with the first byte. If the other end is gone, the data count as sent.
        """
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            del data[: self._sock.sendmsg([data], passed)]
        except BlockingIOError:
            return False
        except OSError as error:
            if (
                error.errno == errno.ETOOMANYREFS
            ):  # so many descriptors are in transit that the kernel refuses more for now
                return False
            data.clear()
            self.broken = True
        return True

    def _stop_sending(self) -> None:
        self.broken = True
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive_available(self, limit: int = _AT_ONCE) -> list[ChannelMessage]:
        """Return the messages that have arrived, at most `limit`; set `gone` if there will be no more."""
        messages: list[ChannelMessage] = []
        while len(messages) < limit and (message := self._receive_one()) is not None:
            messages.append(message)
        return messages

    def receive(self, deadline: Deadline | None = None) -> ChannelMessage | None:
        """Wait for the next message and return it, or None if the other end is gone.

        Raises:
            TimeoutError: no message has arrived by the deadline.
        """
        while (message := self._receive_one()) is None and not self.gone:
            if deadline is not None and deadline.passed:
                raise TimeoutError
            wait_readable([self], None if deadline is None else deadline.left_s)
        return message

    def _receive_one(self) -> ChannelMessage | None:
        """Return the next message if it is complete; leave the messages after it in the socket."""
        while not self.gone:
            try:
                data, fds = self._read(self._expected - len(self._received))
            except BlockingIOError:
                return None
            except OSError:
                data, fds = b"", []
            self._received += data
            self._received_fds += fds
            if not data or len(self._received_fds) > self._max_fds:
                self.is_garbled = self.is_garbled or bool(self._received)
                self._end()
            elif len(self._received) == self._expected and self._is_whole():
                content, received_fds = bytes(self._received[_LENGTH.size :]), tuple(self._received_fds)
                self._received, self._received_fds, self._expected = bytearray(), [], _LENGTH.size
                if (message := self._parse(content, received_fds)) is not None:
                    return message
        return None

    def _is_whole(self) -> bool:
        """Return whether the message is complete; if only its length has arrived, expect the body next."""
        if self._expected > _LENGTH.size:
            return True
        length = int(_LENGTH.unpack(self._received)[0])
        if length > self._max_bytes:
            self.is_garbled = True
            self._end()
            return False
        self._expected += length
        return length == 0

    def _parse(self, body: bytes, fds: tuple[int, ...]) -> ChannelMessage | None:
        """Return the message; if `body` is invalid, close the descriptors and return None."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            content = None
        message = ChannelMessage(content, fds)
        if isinstance(content, dict):
            return message
        message.close()
        self.is_garbled = True
        return None

    def _read(self, size: int) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(self._max_fds * array.array("i").itemsize)
        data, ancillary, flags, _ = self._sock.recvmsg(size, room, _CLOEXEC)
        self.has_lost_fds = self.has_lost_fds or bool(flags & socket.MSG_CTRUNC)
        numbers = array.array("i")
        for level, kind, passed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(passed[: len(passed) - len(passed) % numbers.itemsize])
        if not _CLOEXEC:
            for fd in numbers:
                os.set_inheritable(fd, False)
        return data, list(numbers)

    def _end(self) -> None:
        self.gone = True
        self._stop_sending()
        while self._received_fds:
            os.close(self._received_fds.pop())

    def close(self) -> None:
        """Close the socket, and drop unsent messages."""
        self._end()
        self._sock.close()


def _copy(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        for copy in copies:
            os.close(copy)
        raise
    return copies


# Query the kernel for the process at the other end of a Unix socket (`SO_PEERCRED`).

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
