"""Keep strangers from holding the connections of a listening ZeroMQ socket.

    accepted ──► young ──a member's message──► admitted
                   ├── not authenticated within HANDSHAKE_S ──► closed by ZeroMQ
                   ╰── too many are young, or too many open ──► the oldest young one is closed

ZeroMQ accepts every connection and has no limit, so the guard closes single connections. A member whose connection is
closed connects again by itself.

The guard also notices that a member's connection has ended and was not replaced: the kernel of a host closes the
connections of a process that was killed, whereas a live one connects again at once.
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
from phalanx._comm.control.admission import Complaints, gone_peers

HANDSHAKE_S = 5.0
_YOUNG_S = HANDSHAKE_S + 1.0  # who has not said anything by then is authenticated, or would be closed by ZeroMQ
PIECE_BYTES = 1 << 14  # the most that ZeroMQ allocates at once for a connection that is not authenticated
_CURVE_BYTES = 64  # encryption adds at most so much to a piece
_EVENT_BYTES = 6
_MAX_OPEN_FILES = 1 << 16
_ROUND_EVENTS = 256  # events that are read between two rounds of messages
_READ_S = 1.0  # the pause between two readings of the kernel's table, which may be long
# These are plain numbers: pyzmq's enumerations take longer than what is done with them.
_NOBLOCK, _MORE_FOLLOW = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_Place = tuple[str, int]


class _Ended(NamedTuple):
    """A member's connection has ended at a time; nobody has connected from its host since."""

    host: str
    at: float


class ConnectionGuard:
    """A `ConnectionGuard` watches the listening socket `watched`, and closes the oldest connections of strangers.

    Arguments:
        listening: the descriptor of the socket from which ZeroMQ accepts.
        max_young: how many connections may be open before their first message.
        max_open: how many connections may be open in all.
    """

    def __init__(
        self, watched: zmq.Socket[bytes], listening: int, complaints: Complaints, *, max_young: int, max_open: int
    ) -> None:
        with contextlib.closing(socket.socket(fileno=os.dup(listening))) as listener:
            self._port = int(listener.getsockname()[1])
        self._read_at = -_READ_S
        self._complaints = complaints
        self._max_young, self._max_open = max_young, max_open
        self.socket = watched.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._peers: dict[int, _Place | None] = {}  # by descriptor: the address and port of the other end
        self._young: dict[int, float] = {}  # by descriptor, the oldest first: when it was accepted
        self._unread: set[int] = set()  # descriptors that are no longer young, and whose first message was not read yet
        self._members: dict[int, bytes] = {}  # by descriptor: the identity of the member whose connection it is
        self._current: dict[bytes, int] = {}  # by identity: the descriptor of the newest connection
        self._ended: dict[bytes, _Ended] = {}  # by identity
        self._failed = False
        self._now = time.monotonic()

    @property
    def num_open(self) -> int:
        """Return the number of connections that are open, authenticated or not yet."""
        return len(self._peers)

    @property
    def num_young(self) -> int:
        """Return the number of connections over which no message has come yet."""
        return len(self._young)

    @property
    def needs_admission(self) -> bool:
        """Return whether the next message may be the first of its connection, and must be given to `admit`."""
        return bool(self._young or self._unread)

    @property
    def is_watching(self) -> bool:
        """Return whether `read_events` must be called from time to time although nothing has come."""
        return bool(self._young or self._ended)

    def admit(self, frame: zmq.Frame, identity: bytes = b"") -> None:
        """Note that the connection over which `frame`, a part of a message, has come is a member's.

        `identity` is the member's, where `take_ended` is asked.
        """
        fd = int(frame.get(zmq.SRCFD))
        place = _find_place(fd)
        if place is None:  # it has gone
            return
        while self._peers.get(fd) != place and self._read_event():  # ZeroMQ has queued its event before its message
            pass
        self._ended.pop(identity, None)
        self._young.pop(fd, None)
        self._unread.discard(fd)
        self._members[fd] = identity
        self._current[identity] = fd

    def read_events(self, now: float) -> None:
        """Read what has happened since, or the first part of it. Call `make_room` after the messages were read.

        While events wait to be read ZeroMQ accepts no connection. So strangers who come faster than they are closed are
        held up, and members are heard between two calls.
        """
        self._now = now
        while self._young and now - next(iter(self._young.values())) > _YOUNG_S:
            fd = next(iter(self._young))
            del self._young[fd]
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
            self._failed = True  # the next connection that ends is the failed one: one thread reports both
        elif event == zmq.EVENT_DISCONNECTED:
            self._end(fd)
        return True

    def _accept(self, fd: int) -> None:
        self._forget(fd)
        place = self._peers[fd] = _find_place(fd)
        if place is None:  # it has gone already
            return
        for identity in [who for who, ended in self._ended.items() if ended.host == place[0]]:
            del self._ended[identity]
        self._young[fd] = self._now

    def _end(self, fd: int) -> None:
        place = self._peers.pop(fd, None)
        identity = self._forget(fd)
        if identity and place is not None and not any(self._is_from(young, place[0]) for young in self._young):
            self._ended[identity] = _Ended(place[0], self._now)  # else one of these may be its next connection
        if self._failed:
            self._failed = False
            self._refuse("" if place is None else place[0])

    def _forget(self, fd: int) -> bytes:
        """Forget what is known of a descriptor; return the member whose newest connection it was."""
        self._young.pop(fd, None)
        self._unread.discard(fd)
        identity = self._members.pop(fd, b"")
        if self._current.get(identity) != fd:
            return b""
        del self._current[identity]
        return identity

    def _is_from(self, fd: int, host: str) -> bool:
        place = self._peers.get(fd)
        return place is not None and place[0] == host

    def take_ended(self, now: float) -> list[tuple[bytes, float]]:
        """Return the members, by identity, whose connections ended CONNECTION_ENDED_S ago or earlier, and since when;
        nobody has connected from their hosts since. Each is returned once.
        """
        if self._ended and int(self.socket.get(zmq.EVENTS)) & int(zmq.POLLIN):  # they may have connected again
            return []
        found = [(who, ended.at) for who, ended in self._ended.items() if now - ended.at >= CONNECTION_ENDED_S]
        for identity, _ in found:
            del self._ended[identity]
        return found

    def forgive(self, pause_s: float, now: float) -> None:
        """Note that this process stood still, so that nobody could connect to it."""
        self._ended = {who: ended._replace(at=min(now, ended.at + pause_s)) for who, ended in self._ended.items()}

    def make_room(self, now: float) -> None:
        """Close the oldest young connections as long as there are too many."""
        while self._young and (len(self._young) > self._max_young or len(self._peers) > self._max_open):
            why = f"{self._max_young} newer ones have said nothing either"
            if len(self._peers) > self._max_open:
                why = (
                    f"{self._max_open} connections are open, and a process may have no more. If it is a host of the "
                    "job, raise the limit of open files (`ulimit -Hn`, LimitNOFILE= of a service)"
                )
            fd = next(iter(self._young))
            del self._young[fd]
            place = self._peers.pop(fd)
            assert place is not None  # a connection whose end is unknown is not young
            self._close(fd, place)
            self._complaints.refused(place[0], why, now)

    def close(self) -> None:
        """Stop reading; the end of ZeroMQ's context, which has to follow, stops the watching.

        ZeroMQ's thread waits where more events have come than the queue holds, and `disable_monitor` would wait for it,
        with Python's lock held.
        """
        self.socket.close(0)

    def _close(self, fd: int, place: _Place) -> None:
        """End a connection, which is ZeroMQ's to close, if `fd` is still that one's."""
        with contextlib.suppress(OSError, IndexError):  # it has gone; the address of another kind of socket is a text
            connection = socket.socket(fileno=fd)
            try:
                if connection.getsockname()[1] == self._port and connection.getpeername()[:2] == place:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    def _refuse(self, host: str) -> None:
        if not host and self._now - self._read_at >= _READ_S:
            self._read_at, host = self._now, gone_peers(self._port)
        host = (host or "an address that was gone before it could be seen").removeprefix("::ffff:")
        self._complaints.refused(host, "it does not know the job's key, or speaks another language", self._now)


def protect(listening: zmq.Socket[bytes], piece_bytes: int = PIECE_BYTES) -> None:
    """Bound what one connection of `listening`, which is not bound yet, costs before it is authenticated."""
    listening.maxmsgsize = piece_bytes + _CURVE_BYTES
    listening.handshake_ivl = int(HANDSHAKE_S * 1000)


def connections_allowed(wanted: int = _MAX_OPEN_FILES) -> int:
    """Return how many connections a socket may have, once this process may have `wanted` open files, or all it can.

    A quarter is left for what else the process opens, and for connections that ZeroMQ has accepted and nobody could
    read of yet, a thousand at most. ZeroMQ's thread turns in circles when accept() finds no descriptor.
    """
    limit = min(raise_limit(wanted), _MAX_OPEN_FILES)
    return limit - limit // 4


def cut(part: bytes | memoryview, piece_bytes: int = PIECE_BYTES) -> list[memoryview]:
    """Return `part` in pieces that a protected socket takes; an empty one is one piece."""
    view = memoryview(part)
    return [view[at : at + piece_bytes] for at in range(0, len(view), piece_bytes)] or [view]


def send_in_pieces(to: zmq.Socket[bytes], message: bytes, identity: bytes | None = None) -> None:
    """Send a message in pieces that a protected socket takes, without waiting; a router sends it to `identity`.

    It does what `send_multipart` does, which takes three times as long since it puts the flags together for each piece.

    Raises:
        zmq.Again: there is no room for it; nothing was sent.
        zmq.ZMQError: nobody has that identity.
    """
    if identity is not None:
        to.send(identity, _MORE_FOLLOW)
    *pieces, last = cut(message)
    for piece in pieces:
        to.send(piece, _MORE_FOLLOW)
    to.send(last, _NOBLOCK)


def _find_place(fd: int) -> _Place | None:
    """Return the other end of a connection of ZeroMQ's, if it is still there; this takes no descriptor."""
    try:  # given a family and a kind Python asks the kernel for neither; the answer below has the right ones
        connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:  # it has gone
        return None
    try:
        host, port = connection.getpeername()[:2]
        return (host, port) if isinstance(port, int) else None
    except (OSError, ValueError):  # it has gone, and the number is that of something else by now
        return None
    finally:
        connection.detach()
