"""A line is a socket between a thread that waits for answers and a thread that gives them: one call at a time.

    caller's thread                      callee's thread
    send a call        -- REQUEST -->    read it, run the function
    read the answer    <-- REPLY ---     send the answer

Neither end has another reader. Large tensors go as they do over the connection to which the line belongs.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.log import get_logger
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.ready import Spin
from phalanx.rpc.unix_connection import MOST_PARTS, FrameReader, UnixConnection, after
from phalanx.rpc.wire import LINE, Frame

_logger = get_logger(__name__)
_READ_BYTES = 1 << 16
_MOST_LINES = 16  # of one caller to one callee


class LineEnd:
    """`LineEnd` is one end of a line, of one thread. Another thread may `break_off`."""

    def __init__(self, connection: UnixConnection, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.connection = connection
        self.fd = sock.fileno()
        self._socket = sock
        self._frames = FrameReader(sock, _READ_BYTES)
        self._spin = Spin()
        connection.line_ends.add(self)

    @property
    def peer(self) -> Any:
        return self.connection.peer

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Send a frame. If the other end is gone, reading shows it."""
        parts = self.connection.lay_out(kind, call, data, extras, buffers)
        with contextlib.suppress(OSError):
            while parts:
                try:
                    sent = self._socket.sendmsg(parts[:MOST_PARTS])
                except BlockingIOError:
                    interrupts.wait(self._wait_writable)
                else:
                    parts = after(parts, sent)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        poll.poll()

    def wait(self, bell: int = -1, most_ms: int = -1) -> int:
        """Return 1 if there is something to read, plus 2 if `bell` has rung; 0 if neither, after a while."""
        return self._spin.wait(self.fd, bell, most_ms)

    def read(self) -> list[Frame] | None:
        """Return the frames that have come, of which there is at most one; None at the end."""
        try:
            return self._frames.read(self.connection.take_buffers)
        except Exception as error:  # the frame is malformed
            _logger.error("rpc: the connection to %s is given up: %s", self.peer, error)
            self.connection.break_off()
            return None

    def break_off(self) -> None:
        """Make both ends see the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self._frames.release()
        self.connection.forget_line(self)

    def abandon(self) -> None:
        """Close this process's descriptors in a fork."""
        self._socket.close()


class ServedLine(LineEnd):
    """`ServedLine` is the callee's end: `serve(line, frame)` carries out a call, and answers now or later."""

    def __init__(self, connection: UnixConnection, sock: socket.socket, serve: Callable[[Any, Frame], None]) -> None:
        super().__init__(connection, sock)
        self._serve = serve
        self._writing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="phalanx-rpc-line", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # there can be no more threads
            self.close()
            raise

    def _run(self) -> None:
        try:
            while True:
                self.wait()
                frames = self.read()
                if frames is None:
                    return
                while frames:
                    self._serve(self, frames.pop())  # nothing here keeps the tensors of a call
        finally:
            self.close()

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Send an answer, from any thread."""
        with self._writing:
            super().send(kind, call, data, extras, buffers)

    put = send

    def flush(self) -> None:
        """Do nothing: a line never holds frames back."""


class Line(LineEnd):
    """`Line` is the caller's end. `bell` wakes the thread that waits, also where it waits for the callee to read."""

    def __init__(self, connection: UnixConnection, sock: socket.socket, lines: Lines) -> None:
        self.lines = lines
        self.bell = Wakeup()
        self.has_failed = False  # the call that is under way
        super().__init__(connection, sock)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        poll.register(self.bell.fileno(), select.POLLIN)
        if self.bell.fileno() in dict(poll.poll()):
            self.bell.drain()
            if self.has_failed:  # the callee never gets the rest
                self.break_off()

    def close(self) -> None:
        super().close()
        self.bell.close()

    def abandon(self) -> None:
        super().abandon()
        self.bell.close()


class Lines:
    """`Lines` are those over which this worker calls another one. A thread takes one for a call, and puts it back."""

    def __init__(self, connection: UnixConnection) -> None:
        self._connection = connection
        self._idle: list[Line] = []
        self._numbers = itertools.count()
        self._opening: dict[int, socket.socket] = {}
        self._left: set[Line] = set()

    def take(self) -> Line | None:
        """Return an idle line; if there is none, None: then one is opened for later calls."""
        try:
            return self._idle.pop()
        except IndexError:
            if not self._opening and len(self._connection.line_ends) < _MOST_LINES:
                self._open()
            return None

    def _open(self) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            return
        number = next(self._numbers)
        self._opening[number] = ours
        with theirs:
            if not self._connection.offer_line(number, theirs):
                self.opened(number, False)

    def opened(self, number: int, is_open: bool) -> None:
        """Use a line from now on, because the callee has opened its end, or forget it."""
        ours = self._opening.pop(number, None)
        if ours is None:
            return
        line = None
        if is_open and not self._connection.closed:
            with contextlib.suppress(OSError):
                line = Line(self._connection, ours, self)
        if line is None:
            ours.close()
        else:
            self.put_back(line)

    def put_back(self, line: Line, *, is_over: bool = False) -> None:
        """Put back a line whose call was answered, or at whose other end nobody is any more: `is_over`."""
        self._left.discard(line)
        if is_over:
            line.close()
            return
        line.has_failed = False
        self._idle.append(line)
        if self._connection.closed:
            self.close()

    def leave(self, line: Line) -> bool:
        """Leave to the reader a line for whose answer nobody waits; return False if it was closed instead."""
        if self._connection.closed:
            line.close()
            return False
        self._left.add(line)
        return True

    def abandon(self) -> None:
        """Close this process's descriptors in a fork; those of lines that are open are known to the connection."""
        for sock in self._opening.values():
            sock.close()

    def close(self) -> None:
        """Close the lines that no thread uses: those put them back. The reader calls it, or nobody reads any more."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        while self._left:
            self._left.pop().close()
        while self._opening:
            with contextlib.suppress(KeyError):
                self._opening.popitem()[1].close()


def open_line(connection: UnixConnection, number: int, serve: Callable[[Any, Frame], None]) -> ServedLine | None:
    """Open the callee's end of a line, and say so; return None if there is no descriptor or thread for it."""
    made = None
    sock = connection.take_line(number)
    if sock is not None:
        with contextlib.suppress(RuntimeError):
            made = ServedLine(connection, sock, serve)
    connection.send(LINE, number, b"open" if made is not None else b"")
    return made
