"""Two Unix sockets connect two workers on one host: one carries frames, the other descriptors of segments and lines.

A sender queues its frame and writes as much as the socket accepts. If another thread is writing, that thread writes the
frame as well, so that one system call sends the frames of several threads. The rest is written as soon as the socket
accepts more (`change` makes the reader poll for that). No sender blocks. Only the reader reads.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from phalanx.errors import PhalanxError
from phalanx.rpc import wire
from phalanx.rpc.collector import without_collector
from phalanx.rpc.segments import FROM_BYTES, SegmentMaps, SegmentPool
from phalanx.rpc.wire import BUFFER, HEAD, Frame

_READ_BYTES = 1 << 18
MOST_PARTS = 512  # the maximum number of parts in one system call; the limit of Linux is 1024
_DESCRIPTOR_S = 30.0  # how long to wait for a descriptor, which is sent before the frame that needs the descriptor
_NUMBER = struct.Struct("<Q")
_LINE = 1 << 63  # this bit of a descriptor's number marks the descriptor of a line
_OF_SEGMENTS = frozenset((wire.RELEASE, wire.FORGET, wire.MISSED))
_numbers = itertools.count(1)


class FrameReader:
    """A `FrameReader` reads frames from a socket."""

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._socket = sock
        self._nbytes = nbytes
        self._received = bytearray(nbytes)
        self._view = memoryview(self._received)
        self._have = 0

    def read(self, read_buffers: Callable[[Any, memoryview, int], Any]) -> list[Frame] | None:
        """Return the received frames; None if the other end is closed.

        `read_buffers(table, received, at)` makes the buffers of a frame from its table and `received[at:]`.
        """
        if not self._received:  # `release` was called
            return None
        try:
            got = self._socket.recv_into(self._view[self._have :])
        except BlockingIOError:
            return []
        except OSError:
            return None
        if got == 0:
            return None
        have = self._have + got
        received, view, at = self._received, self._view, 0
        frames = []
        needs = 0
        while have - at >= HEAD.size:
            nbytes, call, data, extras, num_buffers, kind = HEAD.unpack_from(received, at)
            if have - at < nbytes:
                needs = nbytes
                break
            begin = at + HEAD.size
            if num_buffers:
                begin += BUFFER.size * num_buffers
            end = begin + data
            frame = Frame(kind, call, bytes(view[begin:end]))
            if extras:
                begin, end = end, end + extras
                frame.extras = bytes(view[begin:end])
            if num_buffers:
                table = BUFFER.iter_unpack(view[at + HEAD.size :][: BUFFER.size * num_buffers])
                frame.buffers = read_buffers(table, view, end)
            at += nbytes
            frames.append(frame)
        self._have = have - at
        if needs > len(received):  # make room for the whole frame
            grown = bytearray(needs)
            grown[: self._have] = view[at:have]
            self._received, self._view = grown, memoryview(grown)
        elif at and self._have:
            received[: self._have] = received[at:have]
        elif not self._have and len(received) > 4 * self._nbytes:
            self._received = bytearray(self._nbytes)
            self._view = memoryview(self._received)
        return frames

    def release(self) -> None:
        """Release the memory at once: a reference cycle would keep it until Python collects it."""
        self._received, self._view = bytearray(), memoryview(b"")
        self._have = 0


class UnixConnection:
    """A `UnixConnection` is one end of a connection; `peer` is the worker at the other end.

    `change(connection)` is called when `is_full` has changed: the reader then starts or stops polling for writability.
    `has_release(connection)` is called when a tensor in a segment has been freed.
    """

    def __init__(
        self,
        sock: socket.socket,
        fd_sock: socket.socket,
        lender: SegmentPool,
        change: Callable[[UnixConnection], None],
        has_release: Callable[[UnixConnection], None],
    ) -> None:
        sock.setblocking(False)
        fd_sock.setblocking(False)
        self.socket = sock
        self.number = next(_numbers)
        self.peer: Any = None
        self.lines: Any = None  # the `LinePool` of this connection, if this worker calls over it
        self.line_ends: set[Any] = set()  # this worker's ends of all lines, as caller or callee; closed with this
        self.closed = False
        self.is_full = False
        self._fd_socket = fd_sock
        self._lender = lender
        self._change = change
        self._changing = threading.Lock()
        self._has_release = has_release
        self._queue: deque[list[Any]] = deque()
        self._rest: list[Any] = []  # the parts that the socket has not accepted
        self._writing = threading.Lock()
        self._taking = threading.Lock()
        self._frames = FrameReader(sock, _READ_BYTES)
        self._is_broken = False
        self.releases: deque[int] = deque()
        self._borrower = SegmentMaps(self._released)
        self._line_fds: dict[int, int] = {}
        lender.join(self.number, self._forget)

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Send a frame, or leave that to a thread that is writing. Small buffers must not change until it is sent."""
        self.put(kind, call, data, extras, buffers)
        self.flush()

    def put(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Queue a frame, which is sent at the next `flush`."""
        self._queue.append(self.lay_out(kind, call, data, extras, buffers))

    def lay_out(self, kind: int, call: int, data: Any, extras: Any, buffers: Sequence[Any]) -> list[Any]:
        """Return the parts of a frame; large buffers are copied into segments for the receiver."""
        if not buffers:
            return (
                [wire.head(kind, call, data, extras, ()), data, extras]
                if extras
                else [wire.head(kind, call, data, extras, ()), data]
            )
        table: list[tuple[int, int]] = []
        inline = []
        try:
            for one in buffers:
                view = wire.view_bytes(one)
                segment = self._lend(view) if view.nbytes >= FROM_BYTES else 0
                table.append((view.nbytes, segment))
                if not segment:
                    inline.append(view)
            parts = [wire.head(kind, call, data, extras, table), data]
        except BaseException:
            for _, segment in table:
                self._lender.reclaim(segment)
            raise
        if extras:
            parts.append(extras)
        return parts + inline

    def _lend(self, view: memoryview) -> int:
        """Return the number of a segment with a copy of this memory; 0 if no segment can be shared."""
        try:
            segment = self._lender.lend(view.nbytes, self.number)
        except (PhalanxError, OSError):
            return 0
        if self.number not in segment.known_to:
            if not self._send_fd(segment.number, segment.fd):
                self._lender.reclaim(segment.number)
                return 0
            segment.known_to.add(self.number)
        if view.readonly:  # a NumPy array, about which torch would warn
            segment.bytes.numpy()[: view.nbytes] = numpy.frombuffer(view, dtype=numpy.uint8)
        else:
            segment.bytes[: view.nbytes].copy_(torch.frombuffer(view, dtype=torch.uint8))
        return segment.number

    def _send_fd(self, number: int, fd: int) -> bool:
        try:
            socket.send_fds(self._fd_socket, [_NUMBER.pack(number)], [fd])
        except OSError:  # the receiver's buffer is full, or the receiver has ended
            return False
        return True

    def offer_line(self, number: int, end: socket.socket) -> bool:
        """Send one end of a line for the other worker to open; return False if the socket cannot accept it now."""
        if not self._send_fd(_LINE | number, end.fileno()):
            return False
        self.send(wire.LINE, number, b"")
        return True

    @without_collector
    def flush(self) -> None:
        """Write as many of the queued frames as the socket accepts."""
        while (self._queue or self.releases) and self._writing.acquire(blocking=False):
            try:
                if self.closed:
                    self._queue.clear()
                    self.releases.clear()
                    return
                if self.releases:
                    self._queue.append(self._release_frame())
                if self._rest:  # `resume` writes the rest
                    return
                self._write()
            finally:
                self._writing.release()

    @without_collector
    def resume(self) -> None:
        """Write the rest, because the socket is writable again."""
        with self._writing:
            self._write()
            if not self._rest:
                self._set_full(full=False)
        self.flush()

    @without_collector
    def _set_full(self, *, full: bool) -> None:
        with self._changing:
            self.is_full = full
            if not self.closed:
                self._change(self)

    def _release_frame(self) -> list[Any]:
        numbers = array.array("Q")
        while self.releases:
            numbers.append(self.releases.popleft())
        data = numbers.tobytes()
        return [wire.head(wire.RELEASE, 0, data, b"", ()), data]

    def _write(self) -> None:
        while not self.closed:
            parts = self._rest
            while self._queue and len(parts) < MOST_PARTS:
                parts += self._queue.popleft()
            if not parts:
                return
            try:
                if len(parts) <= MOST_PARTS:
                    sent = self.socket.sendmsg(parts)
                else:
                    sent = self.socket.sendmsg(parts[:MOST_PARTS])
            except BlockingIOError:
                sent = 0
            except OSError:  # the other end is closed: the reader detects it
                self._rest = []
                self._queue.clear()
                return
            self._rest = after(parts, sent)
            if self._rest and (sent == 0 or len(parts) <= MOST_PARTS):
                self._set_full(full=True)
                return

    # -- in ------------------------------------------------------------------------------------------------------------

    @without_collector
    def read(self) -> list[Frame] | None:
        """Return the received frames; None if the other end is closed. Only the reader calls this."""
        if self._is_broken:
            return None
        try:
            frames = self._frames.read(self.read_buffers)
        except BaseException:
            self._is_broken = True  # the next read would begin in the middle of a frame
            raise
        if frames is None:
            return None
        return [one for one in frames if one.kind not in _OF_SEGMENTS or self._handle_segment_frame(one)]

    def _handle_segment_frame(self, frame: Frame) -> bool:
        """Handle a frame about segments; return False, because the agent does not handle it."""
        if frame.kind == wire.FORGET:
            for (number,) in _NUMBER.iter_unpack(frame.data):
                self._borrower.forget(number)
        else:
            self._reclaim(frame.data, arrived=frame.kind == wire.RELEASE)
        return False

    def read_buffers(self, table: Any, received: memoryview, at: int) -> Any:
        """Return the buffers of a frame. Every thread that reads this connection or a line of it calls this."""
        found: list[Any] = []
        missed = array.array("Q")
        for nbytes, segment in table:
            if segment:
                view = self._view(segment, nbytes)
                if view is not None:
                    found.append(view)
                else:
                    missed.append(segment)
            else:
                found.append(bytearray(received[at : at + nbytes]))
                at += nbytes
        if not missed:
            return found
        self.send(wire.MISSED, 0, missed.tobytes())
        return MissingBuffers()

    @without_collector
    def _view(self, segment: int, nbytes: int) -> Any:
        with self._taking:
            if not self._borrower.has(segment):
                self._receive_fds(segment)
            return self._borrower.view(segment, nbytes) if self._borrower.has(segment) else None

    def receive_line(self, number: int) -> socket.socket | None:
        """Return the received end of the line with this number; None if the kernel has dropped the descriptor."""
        with self._taking:
            if number not in self._line_fds:
                self._receive_fds(_LINE | number)
            fd = self._line_fds.pop(number, None)
        return None if fd is None else socket.socket(fileno=fd)

    def _receive_fds(self, until: int) -> None:
        """Receive descriptors up to the one with number `until`: they precede the frames that need them."""
        number = 0
        while number != until:
            poll = select.poll()
            poll.register(self._fd_socket, select.POLLIN)
            poll.poll(_DESCRIPTOR_S * 1000)
            data, fds, _, _ = socket.recv_fds(self._fd_socket, _NUMBER.size, 1)
            if not data:
                raise PhalanxError("rpc: no descriptor was received for the memory of a tensor: the sender has ended.")
            (number,) = _NUMBER.unpack(data)
            if not fds:  # the kernel has dropped the descriptor: this process has too many open files
                continue
            if number & _LINE:
                self._line_fds[number ^ _LINE] = fds[0]
            else:
                with contextlib.suppress(OSError):  # the segment cannot be mapped
                    self._borrower.add(number, fds[0])

    def _reclaim(self, data: bytes, *, arrived: bool) -> None:
        for (number,) in _NUMBER.iter_unpack(data):
            self._lender.reclaim(number, arrived=arrived)

    def prepare_fork(self) -> None:
        """Copy the received tensors to private memory, before this process forks."""
        numbers = self._borrower.make_private()
        if numbers:
            self.send(wire.MISSED, 0, array.array("Q", numbers).tobytes())

    def _forget(self, numbers: list[int]) -> None:
        """Notify the other end to unmap these segments."""
        self.send(wire.FORGET, 0, array.array("Q", numbers).tobytes())

    def _released(self, number: int) -> None:
        self.releases.append(number)
        self._has_release(self)

    def abandon(self) -> None:
        """Close the inherited descriptors in a forked child, without notifying the other end."""
        self.closed = True
        for end in [*self.line_ends, *([] if self.lines is None else [self.lines])]:
            end.abandon()
        self.socket.close()
        self._fd_socket.close()

    def shut_down(self) -> None:
        """Shut the connection down, so that both ends find it closed."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets. Received tensors stay valid."""
        if self.closed:
            return
        self.closed = True
        self.shut_down()
        for end in list(self.line_ends):
            end.shut_down()
        self.socket.close()
        self._lender.lost(self.number)
        self._frames.release()
        if self.lines is not None:
            self.lines.close()
        self._rest, self.lines = [], None
        self._queue.clear()
        self.releases.clear()
        self._close_descriptors()

    def forget_line(self, end: Any) -> None:
        """Remove an end of a line that has been closed."""
        self.line_ends.discard(end)
        if self.closed:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close the descriptors and unmap the segments, once no line needs them for its last answer."""
        if not self.line_ends:
            self._fd_socket.close()
            self._borrower.forget_all()
            while self._line_fds:
                os.close(self._line_fds.popitem()[1])


class MissingBuffers:
    """`MissingBuffers` replace tensors whose memory could not be mapped: unpickling them raises the error."""

    def __iter__(self) -> Any:
        raise PhalanxError(
            "the memory of a tensor could not be mapped: this process has reached its limit of open files or of memory "
            "(ulimit -n, -v). Nothing else is lost: close some files or free some memory, and call again."
        )


def after(parts: list[Any], sent: int) -> list[Any]:
    """Return the rest of the parts of frames after their first `sent` bytes."""
    for at, part in enumerate(parts):
        nbytes = len(part)
        if sent < nbytes:
            return [memoryview(part)[sent:] if sent else part, *parts[at + 1 :]]
        sent -= nbytes
    return []
