"""Keep unauthenticated clients from using up the connections of a listening ZeroMQ socket.

    accepted ──► unauthenticated ──a member's message──► admitted
                   ├── not authenticated within HANDSHAKE_S ──► closed by ZeroMQ
                   ╰── too many are unauthenticated, or too many open ──► the oldest unauthenticated one is closed

ZeroMQ accepts every connection and has no limit, so the guard closes some of them. A member whose connection is closed
reconnects automatically.

The guard also notices when a member's connection has ended and was not replaced: the kernel closes the connections of
a killed process, whereas a live process reconnects at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import NamedTuple

import zmq

from phalanx._base.descriptors import raise_limit
from phalanx._base.loss_detection import CONNECTION_ENDED_S
from phalanx._comm.control.admission import RateLimitedLog, recent_peers

HANDSHAKE_S = 5.0
_UNAUTHENTICATED_S = HANDSHAKE_S + 1.0  # by then a connection is authenticated, or ZeroMQ has closed it
PIECE_BYTES = 1 << 14  # the maximum that ZeroMQ allocates at once for an unauthenticated connection
_CURVE_BYTES = 64  # the maximum that encryption adds to a piece
_EVENT_BYTES = 6
_MAX_OPEN_FILES = 1 << 16
_ROUND_EVENTS = 256  # events read between two rounds of messages
_READ_S = 1.0  # the minimum interval between two reads of the kernel's TCP tables, which may be long
# Plain numbers: pyzmq's enumerations cost more than the operations that use them.
_NOBLOCK, _MORE_FOLLOW = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_Place = tuple[str, int]


class _EndedConnection(NamedTuple):
    """The end of a member's connection; no process has connected from its host since."""

    host: str
    at: float


class ConnectionGuard:
    """A `ConnectionGuard` watches the listening socket `watched`, and limits its unauthenticated connections.

    Arguments:
        listening: the descriptor of the socket from which ZeroMQ accepts.
        max_unauthenticated: the maximum number of open connections that have sent no message yet.
        max_open: the maximum number of open connections in all.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        listening: int,
        log: RateLimitedLog,
        *,
        max_unauthenticated: int,
        max_open: int,
    ) -> None:
        with contextlib.closing(socket.socket(fileno=os.dup(listening))) as listener:
            self._port = int(listener.getsockname()[1])
        self._read_at = -_READ_S
        self._log = log
        self._max_unauthenticated, self._max_open = max_unauthenticated, max_open
        self.socket = watched.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._peers: dict[int, _Place | None] = {}  # by descriptor: the address and port of the other end
        self._unauthenticated: dict[int, float] = {}  # by descriptor, the oldest first: when it was accepted
        self._unread: set[int] = set()  # authenticated, with their first message still unread
        self._members: dict[int, bytes] = {}  # by descriptor: the identity of the connection's member
        self._current: dict[bytes, int] = {}  # by identity: the descriptor of the newest connection
        self._ended: dict[bytes, _EndedConnection] = {}  # by identity
        self._failed = False
        self._now = time.monotonic()

    @property
    def num_open(self) -> int:
        """Return the number of open connections, authenticated or not."""
        return len(self._peers)

    @property
    def num_unauthenticated(self) -> int:
        """Return the number of connections that have sent no message yet."""
        return len(self._unauthenticated)

    @property
    def needs_admission(self) -> bool:
        """Return whether the next message may be the first on its connection, so that it must be passed to `admit`."""
        return bool(self._unauthenticated or self._unread)

    @property
    def is_watching(self) -> bool:
        """Return whether `read_events` must be called regularly even if nothing has arrived."""
        return bool(self._unauthenticated or self._ended)

    def admit(self, frame: zmq.Frame, identity: bytes = b"") -> None:
        """Record that the connection on which `frame` arrived belongs to a member.

        `frame` is a part of a message; `pop_ended` later returns the member's `identity`.
        """
        fd = int(frame.get(zmq.SRCFD))
        place = _find_place(fd)
        if place is None:  # the connection has ended
            return
        while self._peers.get(fd) != place and self._read_event():  # ZeroMQ queues an accept before any message
            pass
        self._ended.pop(identity, None)
        self._unauthenticated.pop(fd, None)
        self._unread.discard(fd)
        self._members[fd] = identity
        self._current[identity] = fd

    def read_events(self, now: float) -> None:
        """Read at most one round of new events. Call `make_room` after reading the messages.

        While its queue of events is full, ZeroMQ accepts no connection. So clients that connect faster than the guard
        closes them are slowed down, and members' messages are read between two rounds.
        """
        self._now = now
        while self._unauthenticated and now - next(iter(self._unauthenticated.values())) > _UNAUTHENTICATED_S:
            fd = next(iter(self._unauthenticated))
            del self._unauthenticated[fd]
            self._unread.add(fd)
        for _ in range(_ROUND_EVENTS):
            if not self._read_event():
                return

    def _read_event(self) -> bool:
        try:
            frame, _ = self.socket.recv_multipart(_NOBLOCK)
        except zmq.Again:
            return False
        event, fd = int.from_bytes(frame[:2], "little"), int.from_bytes(frame[2:_EVENT_BYTES], "little")
        if event == zmq.EVENT_ACCEPTED:
            self._accept(fd)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failed = True  # the next connection to end is the one that failed: one thread reports both events
        elif event == zmq.EVENT_DISCONNECTED:
            self._note_end(fd)
        return True

    def _accept(self, fd: int) -> None:
        self._forget(fd)
        place = self._peers[fd] = _find_place(fd)
        if place is None:  # the connection has already ended
            return
        for identity in [who for who, ended in self._ended.items() if ended.host == place[0]]:
            del self._ended[identity]
        self._unauthenticated[fd] = self._now

    def _note_end(self, fd: int) -> None:
        place = self._peers.pop(fd, None)
        identity = self._forget(fd)
        if (
            identity
            and place is not None
            and not any(self._is_from(other, place[0]) for other in self._unauthenticated)
        ):
            # otherwise an unauthenticated connection from this host may be the member's next one
            self._ended[identity] = _EndedConnection(place[0], self._now)
        if self._failed:
            self._failed = False
            self._refuse("" if place is None else place[0])

    def _forget(self, fd: int) -> bytes:
        """Forget a descriptor; return the identity of the member whose newest connection it was, or b""."""
        self._unauthenticated.pop(fd, None)
        self._unread.discard(fd)
        identity = self._members.pop(fd, b"")
        if self._current.get(identity) != fd:
            return b""
        del self._current[identity]
        return identity

    def _is_from(self, fd: int, host: str) -> bool:
        place = self._peers.get(fd)
        return place is not None and place[0] == host

    def pop_ended(self, now: float) -> list[tuple[bytes, float]]:
        """Return, once each, the members whose connection ended at least CONNECTION_ENDED_S ago.

        Each entry has the member's identity and the time of the end. A member is left out if any process on its host
        has connected since.
        """
        if self._ended and int(self.socket.get(zmq.EVENTS)) & int(zmq.POLLIN):  # the members may have reconnected
            return []
        found = [(who, ended.at) for who, ended in self._ended.items() if now - ended.at >= CONNECTION_ENDED_S]
        for identity, _ in found:
            del self._ended[identity]
        return found

    def note_pause(self, pause_s: float, now: float) -> None:
        """Record that this process was stopped for `pause_s`, during which no process could connect to it."""
        self._ended = {who: ended._replace(at=min(now, ended.at + pause_s)) for who, ended in self._ended.items()}

    def make_room(self, now: float) -> None:
        """Close the oldest unauthenticated connections while there are too many."""
        while self._unauthenticated and (
            len(self._unauthenticated) > self._max_unauthenticated or len(self._peers) > self._max_open
        ):
            why = f"{self._max_unauthenticated} newer connections are waiting to authenticate"
            if len(self._peers) > self._max_open:
                why = (
                    f"{self._max_open} connections are open, the most that a process may have. If the peer is a host "
                    "of the job, raise the limit on open files (`ulimit -Hn`, LimitNOFILE= of a service)"
                )
            fd = next(iter(self._unauthenticated))
            del self._unauthenticated[fd]
            place = self._peers.pop(fd)
            assert place is not None  # a connection with an unknown peer is never in `_unauthenticated`
            self._close(fd, place)
            self._log.report_refusal(place[0], why, now)

    def close(self) -> None:
        """Stop reading events. Terminate the ZeroMQ context next, which ends the monitoring.

        ZeroMQ's I/O thread blocks while the queue of events is full; `disable_monitor` would wait for that thread while
        it holds the GIL.
        """
        self.socket.close(0)

    def _close(self, fd: int, place: _Place) -> None:
        """Shut down ZeroMQ's connection `fd`, if its peer is still `place`."""
        with contextlib.suppress(OSError, IndexError):  # it has ended, or is a socket of another kind
            connection = socket.socket(fileno=fd)
            try:
                if connection.getsockname()[1] == self._port and connection.getpeername()[:2] == place:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    def _refuse(self, host: str) -> None:
        if not host and self._now - self._read_at >= _READ_S:
            self._read_at, host = self._now, recent_peers(self._port)
        host = (host or "a peer that disconnected before its address was read").removeprefix("::ffff:")
        self._log.report_refusal(host, "it does not know the job's key, or uses another protocol", self._now)


def protect(listening: zmq.Socket[bytes], piece_bytes: int = PIECE_BYTES) -> None:
    """Limit what an unauthenticated peer can cost this socket; call this before `bind` or `connect`."""
    listening.maxmsgsize = piece_bytes + _CURVE_BYTES
    listening.handshake_ivl = int(HANDSHAKE_S * 1000)


def connections_allowed(wanted: int = _MAX_OPEN_FILES) -> int:
    """Raise the limit on open files to `wanted` if possible, and return how many connections a socket may have.

    A quarter of the limit is reserved for this process's other files, and for up to a thousand connections that ZeroMQ
    has accepted but the guard has not seen. Without a free descriptor, accept() fails and ZeroMQ's I/O thread spins.
    """
    limit = min(raise_limit(wanted), _MAX_OPEN_FILES)
    return limit - limit // 4


def cut(part: bytes | memoryview, piece_bytes: int = PIECE_BYTES) -> list[memoryview]:
    """Split `part` into pieces that a protected socket accepts; an empty part is one piece."""
    view = memoryview(part)
    return [view[at : at + piece_bytes] for at in range(0, len(view), piece_bytes)] or [view]


def send_in_pieces(to: zmq.Socket[bytes], message: bytes, identity: bytes | None = None) -> None:
    """Send a message in pieces that a protected socket accepts, without waiting; a router sends it to `identity`.

    `send_multipart` would take three times as long, because it combines the flags for each piece.

    Raises:
        zmq.Again: the queue is full; nothing was sent.
        zmq.ZMQError: no peer has that identity.
    """
    if identity is not None:
        to.send(identity, _MORE_FOLLOW)
    *pieces, last = cut(message)
    for piece in pieces:
        to.send(piece, _MORE_FOLLOW)
    to.send(last, _NOBLOCK)


def _find_place(fd: int) -> _Place | None:
    """Return the address and port of a ZeroMQ connection's peer, or None if it has ended; this opens no descriptor."""
    try:  # with a given family and type, Python does not query the kernel; getpeername works for any family
        connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:  # the connection has ended
        return None
    try:
        host, port = connection.getpeername()[:2]
        return (host, port) if isinstance(port, int) else None
    except (OSError, ValueError):  # the connection has ended, and its descriptor was reused for another file
        return None
    finally:
        connection.detach()
