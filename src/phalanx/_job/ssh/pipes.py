"""A `PipeChannel` sends messages through two pipes: those of an ssh process, or of a command that sshd runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, cast

from phalanx._base.ipc.channel import Channel
from phalanx._base.ipc.event_loop import Source

# A login shell may print text first: the messages begin after these bytes, which never occur in text.
_MARKER = b"\0phalanx over ssh\0"
_MAX_NOISE_BYTES = 1 << 20
_MAX_BYTES = 1 << 26
AS_TEXT = "latin-1"  # how messages encode the bytes of an agent's output


class _Pipes:
    """`_Pipes` has the socket methods that `Channel` calls, for two pipes; it cannot pass file descriptors."""

    def __init__(self, read_fd: int, write_fd: int, *, skips_noise: bool) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._noise = bytearray()
        self._skips = skips_noise

    def setblocking(self, blocking: bool) -> None:
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, blocking)

    def fileno(self) -> int:
        return self._read_fd

    def sendmsg(self, buffers: list[bytearray], ancillary: object) -> int:
        return os.write(self._write_fd, buffers[0])

    def recvmsg(self, size: int, room: int, flags: int) -> tuple[bytes, list[Any], int, None]:
        while self._skips:
            data = os.read(self._read_fd, 1)  # one byte at a time, so that no byte after the marker is lost
            self._noise += data
            if not data or len(self._noise) > _MAX_NOISE_BYTES:
                return b"", [], 0, None
            self._skips = not self._noise.endswith(_MARKER)
        return os.read(self._read_fd, size), [], 0, None

    def close(self) -> None:
        for fd in (self._read_fd, self._write_fd):
            os.close(fd)


class PipeChannel:
    """A `PipeChannel` is a `Channel` over two pipes, which it owns.

    The host's end marks where its messages begin (`marks`); the terminal's end skips everything before the mark.
    """

    def __init__(self, read_fd: int, write_fd: int, *, marks: bool) -> None:
        if marks:
            os.write(write_fd, _MARKER)
        self._write_fd = write_fd
        pipes = _Pipes(read_fd, write_fd, skips_noise=not marks)
        self._channel = Channel(cast(socket.socket, pipes), max_bytes=_MAX_BYTES, max_fds=0)
        self._is_closed = False

    @property
    def is_at_end(self) -> bool:
        """Return whether the other end is closed."""
        return self._channel.gone

    @property
    def is_waiting(self) -> bool:
        """Return whether unsent messages are queued."""
        return self._channel.waiting and not self._is_closed

    def put(self, do: str, **fields: Any) -> None:
        """Send or queue a message; do nothing if the other end is closed."""
        if not self._is_closed:
            self._channel.put({"do": do, **fields})

    def make_source(self, on_message: Callable[[dict[str, Any]], object], may_read: Callable[[], bool]) -> Source:
        """Return an event loop source for this channel, which is read only while `may_read()` is true."""

        def handle(ready: set[int]) -> None:
            if self._is_closed:
                return
            if self._write_fd in ready:
                self._channel.send_some()
            if self._channel.fileno() in ready and not self.is_at_end:
                for message in self._channel.receive_available():
                    on_message(message.content)

        return Source(
            handle,
            lambda: (self._channel.fileno(),) if not (self._is_closed or self.is_at_end) and may_read() else (),
            lambda: (self._write_fd,) if self.is_waiting else (),
        )

    def close(self) -> None:
        """Close both pipes, and drop unsent messages. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._channel.close()
