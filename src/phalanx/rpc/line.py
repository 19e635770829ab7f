"""A line is a socket from a calling thread directly to a thread of the callee, which runs one call at a time.

    caller's thread                      callee's thread
    send a call        -- REQUEST -->    read it, run the function
    read the answer    <-- REPLY ---     send the answer

Each end has one reader at a time. Large tensors are sent in shared-memory segments of the line's connection.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from phalanx._base.ipc.spin_wait import SpinWait
from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.log import get_logger
from phalanx.rpc.agent import interrupts
from phalanx.rpc.unix_connection import MOST_PARTS, FrameReader, UnixConnection, after
from phalanx.rpc.wire import LINE, Frame

_logger = get_logger(__name__)
_READ_BYTES = 1 << 16
_MOST_LINES = 16  # from one caller to one callee


class LineEnd:
    """A `LineEnd` is one end of a line. One thread at a time reads it, but any thread may call `shut_down`."""

    def __init__(self, connection: UnixConnection, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.connection = connection
        self.fd = sock.fileno()
        self._socket = sock
        self._frames = FrameReader(sock, _READ_BYTES)
        self._spin = SpinWait()
        connection.line_ends.add(self)

    @property
    def peer(self) -> Any:
        return self.connection.peer

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Send a frame. If the other end is closed, the frame is dropped, and `read` returns None."""
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
        """Return 1 if the line can be read, plus 2 if `bell` has rung; 0 if neither, after a timeout or a signal."""
        return self._spin.wait(self.fd, bell, most_ms)

    def read(self) -> list[Frame] | None:
        """Return a list with the received frame, empty if there is none yet; None if the other end is closed."""
        try:
            return self._frames.read(self.connection.read_buffers)
        except Exception as error:  # the frame is malformed
            _logger.error("rpc: the connection to %s is closed: %s", self.peer, error)
            self.connection.shut_down()
            return None

    def shut_down(self) -> None:
        """Shut the line down, so that both ends find it closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self._frames.release()
        self.connection.forget_line(self)

    def abandon(self) -> None:
        """Close the inherited descriptor in a forked child."""
        self._socket.close()


class CalleeLine(LineEnd):
    """A `CalleeLine` is the callee's end: `serve(line, frame)` runs a call, and answers now or later."""

    def __init__(self, connection: UnixConnection, sock: socket.socket, serve: Callable[[Any, Frame], None]) -> None:
        super().__init__(connection, sock)
        self._serve = serve
        self._writing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="phalanx-rpc-line", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # no more threads can be started
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
                    self._serve(self, frames.pop())  # keeps no reference to the call's tensors
        finally:
            self.close()

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Send an answer, from any thread."""
        with self._writing:
            super().send(kind, call, data, extras, buffers)

    put = send

    def flush(self) -> None:
        """Do nothing: a line queues no frames."""


class CallerLine(LineEnd):
    """A `CallerLine` is the caller's end. `bell` wakes the thread that waits to read or write."""

    def __init__(self, connection: UnixConnection, sock: socket.socket, lines: LinePool) -> None:
        self.lines = lines
        self.bell = Wakeup()
        self.has_failed = False  # whether the call in flight has failed
        super().__init__(connection, sock)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        poll.register(self.bell.fileno(), select.POLLIN)
        if self.bell.fileno() in dict(poll.poll()):
            self.bell.drain()
            if self.has_failed:  # the rest of the call is never sent
                self.shut_down()

    def close(self) -> None:
        super().close()
        self.bell.close()

    def abandon(self) -> None:
        super().abandon()
        self.bell.close()


class LinePool:
    """A `LinePool` owns the lines over which this worker calls another worker.

    opening ──► idle ◄──► acquired by a thread for a call ──► transferred to the reader: the thread stopped waiting
                  ▲                                                │
                  ╰──────────────── the answer ────────────────────╯
    """

    def __init__(self, connection: UnixConnection) -> None:
        self._connection = connection
        self._idle: list[CallerLine] = []
        self._numbers = itertools.count()
        self._opening: dict[int, socket.socket] = {}
        self._transferred: set[CallerLine] = set()

    def acquire(self) -> CallerLine | None:
        """Return an idle line; if there is none, return None and open one for later calls."""
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
        """Add the line to the idle lines if the callee has opened its end; otherwise close this end."""
        ours = self._opening.pop(number, None)
        if ours is None:
            return
        line = None
        if is_open and not self._connection.closed:
            with contextlib.suppress(OSError):
                line = CallerLine(self._connection, ours, self)
        if line is None:
            ours.close()
        else:
            self.release(line)

    def release(self, line: CallerLine, *, is_over: bool = False) -> None:
        """Release a line whose call was answered; if the other end is closed (`is_over`), close the line."""
        self._transferred.discard(line)
        if is_over:
            line.close()
            return
        line.has_failed = False
        self._idle.append(line)
        if self._connection.closed:
            self.close()

    def transfer(self, line: CallerLine) -> bool:
        """Transfer to the reader a line for whose answer no thread waits; return False if the connection is closed."""
        if self._connection.closed:
            line.close()
            return False
        self._transferred.add(line)
        return True

    def abandon(self) -> None:
        """Close the descriptors of opening lines in a forked child; the connection closes those of open lines."""
        for sock in self._opening.values():
            sock.close()

    def close(self) -> None:
        """Close the lines that no thread has acquired. Call this once the connection is closed."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        while self._transferred:
            self._transferred.pop().close()
        while self._opening:
            with contextlib.suppress(KeyError):
                self._opening.popitem()[1].close()


def open_line(connection: UnixConnection, number: int, serve: Callable[[Any, Frame], None]) -> CalleeLine | None:
    """Open the callee's end of a line and answer the request; return None if no descriptor or thread is available."""
    made = None
    sock = connection.receive_line(number)
    if sock is not None:
        with contextlib.suppress(RuntimeError):
            made = CalleeLine(connection, sock, serve)
    connection.send(LINE, number, b"open" if made is not None else b"")
    return made
