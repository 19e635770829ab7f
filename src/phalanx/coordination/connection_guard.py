"""Keep strangers from holding the connections of a listening socket of ZeroMQ's.

    accepted ──► young ──a member's message──► admitted         a young one that ZeroMQ has not authenticated within
                   │                                            HANDSHAKE_S is closed by ZeroMQ itself
                   ╰──others crowd in──► closed by us

ZeroMQ accepts whoever comes, and has no limit for it. So we close single connections: where too many are young, or the
process has no room for more, the oldest of the address that has the most young ones; where no address has more than a
host of a job opens, the oldest of all. A member that is closed so by chance connects again by itself. An address from
which one connection after another fails is kept out by the kernel for a while (`blocked_networks`).

The guard also notices whose connection has ended and is not replaced: the kernel of a host closes the connections of
a process that was killed, whereas a live one connects again at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import OrderedDict
from typing import NamedTuple

import zmq

from phalanx.coordination.admission import Complaints, gone_peers
from phalanx.coordination.blocked_networks import BLOCKED_S, FAILURES, BlockedNetworks
from phalanx.coordination.young_connections import HONEST, YoungConnections, classify
from phalanx.descriptors import raise_limit
from phalanx.loss_detection import CONNECTION_ENDED_S
from phalanx.packet_filter import attach, drop_from

HANDSHAKE_S = 5.0
PIECE_BYTES = 1 << 14  # the most that ZeroMQ gives memory for at once, before it knows for whom
_CURVE_BYTES = 64  # encryption adds at most so much to a piece
_EVENT_BYTES = 6
_MAX_OPEN_FILES = 1 << 16
_ROUND_EVENTS = 256  # so many events are read before members are heard again
_CROWDS = 8  # if no address has many young connections, so many times more may be young in all
_READ_S = 1.0  # the pause between two readings of the kernel's table, which may be long
# These are plain numbers: pyzmq's enumerations take longer than what is done with them.
_NOBLOCK, _MORE_FOLLOW = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class _Peer(NamedTuple):
    """The other end of a connection: its address and port, and the network whose connections are counted together."""

    place: tuple[str, int]
    network: str
    is_own: bool  # whether it is an address of this host, which is never blocked


class _Ended(NamedTuple):
    """A member's connection has ended at a time; nobody of its network has connected since."""

    network: str
    at: float


class ConnectionGuard:
    """A guard that watches the listening socket `watched`, and closes connections of strangers where they crowd in.

    Arguments:
        listening: the descriptor of the socket that ZeroMQ accepts from.
        max_young: how many connections may be open before their first message; eight times as many as long as no
            address has more than eight of them.
        max_open: how many may be open in all. Beyond that a young one is closed for each that comes, and comes again.
    """

    def __init__(
        self, watched: zmq.Socket[bytes], listening: int, complaints: Complaints, *, max_young: int, max_open: int
    ) -> None:
        self._listening = socket.socket(fileno=os.dup(listening))
        self._port = int(self._listening.getsockname()[1])
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
        self._blocked = BlockedNetworks()
        # the identities of members whose coming was not read yet
        self._spoken: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._members: dict[int, bytes] = {}  # by descriptor: the identity of the member whose connection it is
        self._current: dict[bytes, int] = {}  # by identity: the descriptor of the newest connection
        self._ended: dict[bytes, _Ended] = {}  # by identity
        self._failed = False

    @property
    def num_open(self) -> int:
        """Return the number of connections that are open, authenticated or not yet."""
        return len(self._peers)

    @property
    def num_young(self) -> int:
        """Return the number of connections over which no message has come yet."""
        return len(self._young)

    @property
    def is_watching(self) -> bool:
        """Return whether `read_events` must be called from time to time although nothing has come."""
        return bool(len(self._young) or len(self._blocked) or self._ended)

    def admit(self, frame: zmq.Frame, identity: bytes = b"") -> None:
        """Note that the connection is a member's over which `frame`, a part of a message, has come.

        `identity` is the member's, where `take_ended` is asked.
        """
        fd = int(frame.get(zmq.SRCFD))
        peer, known = _find_peer(fd), self._peers.get(fd)
        if peer is None:  # it has gone
            return
        self._blocked.note_member(peer.network)
        self._ended.pop(identity, None)
        if known is not None and known.place == peer.place:
            self._young.discard(fd)
            self._note_member(fd, identity)
        else:  # the event that tells of it is yet to be read
            self._spoken[peer.place] = identity
            if len(self._spoken) > _ROUND_EVENTS:
                self._spoken.popitem(last=False)

    def read_events(self, now: float) -> None:
        """Read what has happened since, or the first part of it; `make_room` follows, once messages were read.

        While events wait to be read ZeroMQ accepts nobody: so strangers who come faster than they are closed are held
        up, and members are heard between two calls.
        """
        for fd in self._young.older_than(HANDSHAKE_S + 1.0, now):
            self._young.discard(fd)  # ZeroMQ has authenticated it, or it would be closed
        if self._blocked.expire(now):
            self._filter()
        for _ in range(_ROUND_EVENTS):
            try:
                frame, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = int.from_bytes(frame[:2], "little"), int.from_bytes(frame[2:_EVENT_BYTES], "little")
            if event == zmq.EVENT_ACCEPTED:
                self._accept(value, now)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                # the next connection that ends is the failed one: one thread of ZeroMQ reports both
                self._failed = True
            elif event == zmq.EVENT_DISCONNECTED:
                peer = self._peers.pop(value, None)
                identity = self._members.pop(value, None)
                if identity and peer is not None and self._current.get(identity) == value:
                    del self._current[identity]
                    if not self._young.of(peer.network):  # one of these may be the next connection of this member
                        self._ended[identity] = _Ended(peer.network, now)
                if self._failed:
                    self._refuse("" if peer is None else peer.place[0], now)
                if value in self._young:
                    self._young.discard(value)
                    self._note_failure(peer, now)
                self._failed = False

    def take_ended(self, now: float) -> list[tuple[bytes, float]]:
        """Return the members, by identity, whose connections ended CONNECTION_ENDED_S ago or earlier, and since when;
        nobody has connected from their networks since. Each is returned once.
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
        """Close young connections as long as there are too many. Whose messages have come must have been admitted."""
        while len(self._young):
            is_full = len(self._peers) > self._max_open
            is_crowded = self._young.most > HONEST
            if not is_full and len(self._young) <= self._max_young * (1 if is_crowded else _CROWDS):
                return
            fd = self._young.choose()
            peer = self._peers.pop(fd)
            self._young.discard(fd)
            assert peer is not None  # a connection whose end is unknown is not known to be young
            self._close(fd, peer)
            if is_full and not is_crowded:
                self._complaints.add(
                    f"{self._max_open} connections are open, and a process may have no more: {peer.place[0]} is left "
                    "waiting. Raise the limit of open files (`ulimit -Hn`, LimitNOFILE= of a service)",
                    now,
                )
            else:
                self._complaints.refused(peer.place[0], "it keeps connections open and says nothing", now)
            self._note_failure(peer, now)

    def _note_failure(self, peer: _Peer | None, now: float) -> None:
        """Note that a connection has ended over which no message has come; block a network from which many of them
        come.
        """
        if peer is None or peer.is_own or not self._blocked.note_failure(peer.network, now):
            return
        self._filter()
        for fd in self._young.of(peer.network):
            other = self._peers.pop(fd)
            self._young.discard(fd)
            if other is not None:
                self._close(fd, other)
        self._complaints.add(f"{peer.network} is kept out for {BLOCKED_S:g} s: {FAILURES} connections failed", now)

    def _filter(self) -> None:
        attach(self._listening, drop_from(self._blocked.networks) if len(self._blocked) else None)

    def close(self) -> None:
        """Stop reading; the end of ZeroMQ's context, which has to follow, stops the watching.

        ZeroMQ's thread waits where more events have come than the queue holds, and `disable_monitor` would wait for it,
        with Python's lock held.
        """
        self.socket.close(0)
        self._listening.close()

    def _accept(self, fd: int, now: float) -> None:
        self._young.discard(fd)
        before = self._members.pop(fd, b"")
        if self._current.get(before) == fd:
            del self._current[before]
        peer = self._peers[fd] = _find_peer(fd, takes_all=bool(len(self._blocked)))
        if peer is None:  # it has gone already
            return
        for who in [who for who, ended in self._ended.items() if ended.network == peer.network]:
            del self._ended[who]
        identity = self._spoken.pop(peer.place, None)
        if identity is None:
            self._young.add(fd, peer.network, now)
        else:
            self._note_member(fd, identity)

    def _note_member(self, fd: int, identity: bytes) -> None:
        self._members[fd] = identity
        self._current[identity] = fd

    def _close(self, fd: int, peer: _Peer) -> None:
        """End a connection, which is ZeroMQ's to close, if `fd` is still that one's."""
        with contextlib.suppress(OSError, IndexError):  # it has gone; the address of another kind of socket is a text
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


def _find_peer(fd: int, *, takes_all: bool = False) -> _Peer | None:
    """Find the other end of a connection of ZeroMQ's, if it is still there; this takes no descriptor.

    With `takes_all` it is freed from the filter that it has from the socket that listens.
    """
    try:  # given a family and a kind Python asks the kernel for neither; the answers below have the right ones
        connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:  # it has gone
        return None
    try:
        host, port = connection.getpeername()[:2]
        network, is_own = classify(host, connection.getsockname()[0])
        if takes_all:
            attach(connection, None)
    except (OSError, ValueError, TypeError, IndexError):  # it has gone, and the number is that of something else by now
        return None
    finally:
        connection.detach()
    return _Peer((host, port), network, is_own)
