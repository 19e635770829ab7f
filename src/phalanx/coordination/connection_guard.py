"""Keep strangers from holding the connections of a listening socket of ZeroMQ's.

    accepted ──► young ──a member's message──► admitted         a young one that ZeroMQ has not authenticated within
                   │                                            HANDSHAKE_S is closed by ZeroMQ itself
                   ╰──others crowd in──► closed by us

ZeroMQ accepts whoever comes, and has no limit for it. So we close single connections: where too many are young, or the
process has no room for more, the oldest of the address that has the most young ones; where no address has more than a
host of a job opens, the oldest of all. A member that is closed so by chance connects again by itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import OrderedDict
from typing import NamedTuple

import zmq

from phalanx.coordination.admission import Complaints, gone_peers
from phalanx.coordination.young_connections import HONEST, YoungConnections
from phalanx.descriptors import raise_limit

HANDSHAKE_S = 5.0
PIECE_BYTES = 1 << 16  # the most that ZeroMQ gives memory for at once, before it knows for whom
_CURVE_BYTES = 64  # what encryption adds to a piece, at most
_EVENT_BYTES = 6
_MAX_OPEN_FILES = 1 << 16
_ROUND_EVENTS = 256  # that are read before members are heard again
_CROWDS = 8  # times as many may be young in all, where no address has more than that
_READ_S = 1.0  # between two readings of the kernel's table, which may be long


class _Peer(NamedTuple):
    """The other end of a connection: its address and port, and the network whose connections are counted together."""

    place: tuple[str, int]
    network: str


class ConnectionGuard:
    """A guard that watches the listening socket `watched`, and closes connections of strangers where they crowd in.

    Arguments:
        max_young: how many connections may be open before their first message; eight times as many as long as no
            address has more than eight of them.
        max_open: how many may be open in all. Beyond that a young one is closed for each that comes, and comes again.
    """

    def __init__(
        self, watched: zmq.Socket[bytes], port: int, complaints: Complaints, *, max_young: int, max_open: int
    ) -> None:
        self._port = port
        self._read_at = -_READ_S
        self._complaints = complaints
        self._max_young, self._max_open = max_young, max_open
        self.socket = watched.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._peers: dict[int, _Peer | None] = {}  # by descriptor
        self._young = YoungConnections()
        self._spoken: OrderedDict[tuple[str, int], None] = OrderedDict()  # members whose coming was not read yet
        self._failed = False

    @property
    def num_open(self) -> int:
        """The number of connections that are open, authenticated or not yet."""
        return len(self._peers)

    @property
    def num_young(self) -> int:
        """The number of connections over which no message has come yet."""
        return len(self._young)

    def admit(self, frame: zmq.Frame) -> None:
        """Note that the connection is a member's over which `frame`, a part of a message, has come."""
        fd = int(frame.get(zmq.SRCFD))
        peer, known = _find_peer(fd), self._peers.get(fd)
        if peer is None:  # it has gone
            return
        if known is not None and known.place == peer.place:
            self._young.discard(fd)
        else:  # the event that tells of it is yet to be read
            self._spoken[peer.place] = None
            if len(self._spoken) > _ROUND_EVENTS:
                self._spoken.popitem(last=False)

    def read_events(self, now: float) -> None:
        """Read what has happened since, or the first part of it; `make_room` follows, once messages were read.

        While events wait to be read ZeroMQ accepts nobody: so strangers who come faster than they are closed are held
        up, and members are heard between two calls.
        """
        for fd in self._young.older_than(HANDSHAKE_S + 1.0, now):
            self._young.discard(fd)  # ZeroMQ has authenticated it, or it would be closed
        for _ in range(_ROUND_EVENTS):
            try:
                frame, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = int.from_bytes(frame[:2], "little"), int.from_bytes(frame[2:_EVENT_BYTES], "little")
            if event == zmq.EVENT_ACCEPTED:
                self._accept(value, now)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._failed = True  # of the connection that ends next: one thread of ZeroMQ does both
            elif event == zmq.EVENT_DISCONNECTED:
                peer = self._peers.pop(value, None)
                self._young.discard(value)
                if self._failed:
                    self._refuse("" if peer is None else peer.place[0], now)
                self._failed = False

    def make_room(self, now: float) -> None:
        """Close young connections as long as there are too many. Whose messages have come must have been admitted."""
        while len(self._young):
            is_full = len(self._peers) > self._max_open
            is_crowded = self._young.most > HONEST
            if not is_full and len(self._young) <= self._max_young * (1 if is_crowded else _CROWDS):
                return
            fd = self._young.choose()
            peer = self._peers.pop(fd)
            self._young.discard(fd)
            assert peer is not None  # of others we don't know that they are young
            self._close(fd, peer)
            if is_full and not is_crowded:
                self._complaints.add(
                    f"{self._max_open} connections are open, and a process may have no more: {peer.place[0]} is left "
                    "waiting. Raise the limit of open files (`ulimit -Hn`, LimitNOFILE= of a service)",
                    now,
                )
            else:
                self._complaints.refused(peer.place[0], "it keeps connections open and says nothing", now)

    def close(self) -> None:
        """Stop reading; the end of ZeroMQ's context, which has to follow, stops the watching.

        ZeroMQ's thread waits where more events have come than the queue holds, and `disable_monitor` would wait for it,
        with Python's lock held.
        """
        self.socket.close(0)

    def _accept(self, fd: int, now: float) -> None:
        self._young.discard(fd)
        peer = self._peers[fd] = _find_peer(fd)
        if peer is None:  # it has gone already
            return
        if self._spoken.pop(peer.place, self) is self:
            self._young.add(fd, peer.network, now)

    def _close(self, fd: int, peer: _Peer) -> None:
        """End a connection, which is ZeroMQ's to close, if `fd` is still that one's."""
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=fd)
            try:
                if connection.getsockname()[1] == self._port and connection.getpeername()[:2] == peer.place:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    def _refuse(self, peer: str, now: float) -> None:
        if not peer and now - self._read_at >= _READ_S:
            self._read_at, peer = now, gone_peers(self._port)
        peer = (peer or "an address that was gone before it could be seen").removeprefix("::ffff:")
        self._complaints.refused(peer, "it does not know the job's key, or speaks another language", now)


def protect(listening: zmq.Socket[bytes], piece_bytes: int = PIECE_BYTES) -> None:
    """Bound what one connection of `listening`, which is not bound yet, costs before it is authenticated."""
    listening.maxmsgsize = piece_bytes + _CURVE_BYTES
    listening.handshake_ivl = int(HANDSHAKE_S * 1000)


def connections_allowed(*, raises: bool = False) -> int:
    """Return how many connections a socket may have; with `raises`, once the process may have all descriptors it can.

    The rest of the process needs some, too; and ZeroMQ's thread turns in circles when accept() finds none.
    """
    limit = min(raise_limit(_MAX_OPEN_FILES if raises else 0), _MAX_OPEN_FILES)
    return limit - limit // 4


def cut(part: bytes | memoryview, piece_bytes: int = PIECE_BYTES) -> list[memoryview]:
    """Return `part` in pieces that a protected socket takes; an empty one is one piece."""
    view = memoryview(part)
    return [view[at : at + piece_bytes] for at in range(0, len(view), piece_bytes)] or [view]


def _find_peer(fd: int) -> _Peer | None:
    """Find the other end of a connection of ZeroMQ's, if it is still there; this takes no descriptor."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:  # it has gone, and the number is that of something else by now
        return None
    try:
        host, port = connection.getpeername()[:2]
        address = ipaddress.ip_address(host.partition("%")[0])
    except (OSError, ValueError, TypeError):
        return None
    finally:
        connection.detach()
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _Peer((host, port), str(address.ipv4_mapped))
        return _Peer((host, port), str(ipaddress.ip_network((address, 64), strict=False)))
    return _Peer((host, port), host)
