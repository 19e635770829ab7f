"""`MessageStreams` carry a rank's short messages to and from a few peers, over a TCP connection with each.

Gloo takes three packets for a message, and a thread on either side that must wake up. Here a message is one packet, and
the thread that waits for it reads it: that thread handles signals, and sees at once that a connection was closed.

    rank b ──hello──▶ rank a      a listens at its Gloo address until its peers are connected
    rank b ◀──reply── rank a      b > a; both are MACs, with the group's secret, of the two ranks
    then, each way:  length (4 bytes)  message  length  message ...
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.spin_wait import SpinWait

Place = tuple[str, int]
"""An address and a port."""
_LENGTH = struct.Struct("<I")
_MAC_BYTES = 32
_HELLO_BYTES = _LENGTH.size + _MAC_BYTES  # the sender's rank, and the MAC
_MOST_PENDING = 64  # accepted connections without a valid hello; beyond that the oldest is closed
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a lost connection is an error, even where SIGPIPE ends the program
_MOST_S = 1e6  # the system's calls accept no infinite time, and no month
_MOST_WAIT_S = 1.0  # then the thread handles a signal that came just before its wait


class StreamListener:
    """A `StreamListener` listens at an address of this host until `connect` has connected this rank with its peers.

    Raises:
        RuntimeError: this rank cannot listen there, or the address is "", unknown.
    """

    def __init__(self, host: str) -> None:
        if not host:  # an empty one would mean every address of this host
            raise RuntimeError("the address of this host is unknown")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family, backlog=_MOST_PENDING)
        except OSError as error:
            raise RuntimeError(f"cannot listen at {host}: {error.strerror}") from error
        self._socket.setblocking(False)
        self.place: Place = self._socket.getsockname()[:2]

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def connect(
        self, rank: int, peers: Sequence[int], places: Mapping[int, Place], secret: str, deadline: Deadline
    ) -> MessageStreams:
        """Connect this rank with `peers`, which call this, too, and listen at `places`; then stop listening.

        Raises:
            RuntimeError: a peer cannot be reached, or did not connect in time.
        """
        greetings = _Greetings(secret, rank)
        smaller, larger = [p for p in peers if p < rank], {p for p in peers if p > rank}
        with contextlib.closing(self), contextlib.ExitStack() as stack:
            connected: dict[int, socket.socket] = {}
            for peer in smaller:
                with _reaching(peer, places[peer]):
                    one = socket.create_connection(places[peer], _left_s(deadline))
                    connected[peer] = stack.enter_context(one)
                    one.sendall(_LENGTH.pack(rank) + greetings.to(peer), _NO_SIGNAL)
            for peer, one in self._accept(larger, greetings, deadline).items():
                connected[peer] = stack.enter_context(one)
            for peer in smaller:
                with _reaching(peer, places[peer]):
                    connected[peer].settimeout(_left_s(deadline))
                    reply = _receive_exactly(connected[peer], _MAC_BYTES)
                if len(reply) < _MAC_BYTES:
                    raise RuntimeError(f"rank {peer} at {places[peer][0]} closed the connection at once")
                if not hmac.compare_digest(reply, greetings.of(peer)):
                    raise RuntimeError(f"rank {peer} at {places[peer][0]} did not answer as a rank of this group")
            stack.pop_all()
        return MessageStreams(connected)

    def _accept(self, awaited: set[int], greetings: _Greetings, deadline: Deadline) -> dict[int, socket.socket]:
        """Return a connection with each of the peers `awaited`; close the connections of strangers."""
        found: dict[int, socket.socket] = {}
        pending: dict[socket.socket, bytearray] = {}  # what each new connection has sent so far
        with contextlib.ExitStack() as stack:
            stack.callback(_close_all, found)
            try:
                while len(found) < len(awaited):
                    if deadline.passed:
                        raise RuntimeError(f"rank {min(awaited - found.keys())} did not connect in time")
                    ready = wait_readable([self._socket, *pending], _left_s(deadline))
                    for one in ready:
                        if one is not self._socket and (hello := _read_hello(one, pending[one])) is not None:
                            del pending[one]
                            peer = int.from_bytes(hello[: _LENGTH.size], "little")
                            is_awaited = peer in awaited and peer not in found
                            if is_awaited and hmac.compare_digest(hello[_LENGTH.size :], greetings.of(peer)):
                                found[peer] = one
                                with contextlib.suppress(OSError):  # lost already: the first message fails
                                    one.sendall(greetings.to(peer), _NO_SIGNAL)
                            else:
                                one.close()
                    if self._socket in ready:
                        self._take(pending)
            finally:
                for one in pending:
                    one.close()
            stack.pop_all()
        return found

    def _take(self, pending: dict[socket.socket, bytearray]) -> None:
        """Accept a connection, and close the oldest if too many have not sent their hello."""
        try:
            one = self._socket.accept()[0]
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            raise RuntimeError(f"cannot accept connections: {error.strerror}") from error
        one.setblocking(False)
        pending[one] = bytearray()
        if len(pending) > _MOST_PENDING:
            oldest = next(iter(pending))
            del pending[oldest]
            oldest.close()


def _left_s(deadline: Deadline) -> float:
    return min(max(deadline.left_s, 0.001), _MOST_S)


def _close_all(connections: Mapping[int, socket.socket]) -> None:
    for one in connections.values():
        one.close()


@contextlib.contextmanager
def _reaching(peer: int, place: Place) -> Iterator[None]:
    """Convert an OSError in the block to a RuntimeError that names the peer."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"no connection with rank {peer} at {place[0]}: {error.strerror or error}") from error


def _read_hello(one: socket.socket, received: bytearray) -> bytes | None:
    """Read from a new connection; return its hello, a shorter one if the peer closed it, or None if more may come."""
    try:
        part = one.recv(_HELLO_BYTES - len(received))
    except BlockingIOError:
        return None
    except OSError:
        part = b""
    received += part
    return None if part and len(received) < _HELLO_BYTES else bytes(received)


class _Greetings:
    """`_Greetings` prove to each of two ranks that the other one knows the group's secret."""

    def __init__(self, secret: str, rank: int) -> None:
        self._secret = secret.encode()
        self._rank = rank

    def to(self, peer: int) -> bytes:
        return self._mac(self._rank, peer)

    def of(self, peer: int) -> bytes:
        return self._mac(peer, self._rank)

    def _mac(self, src: int, dst: int) -> bytes:
        return hmac.digest(self._secret, b"phalanx messages from rank %d to rank %d" % (src, dst), "sha256")


def _receive_exactly(one: socket.socket, nbytes: int) -> bytes:
    """Return the next `nbytes` bytes from a blocking socket, or fewer if the peer closes the connection."""
    received = b""
    while len(received) < nbytes and (part := one.recv(nbytes - len(received))):
        received += part
    return received


class StreamBroken(RuntimeError):
    """The stream with `peer` is lost or late; a thread that waits for another peer may find this out."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(said)
        self.peer = peer


class MessageStreams:
    """`MessageStreams` send and receive short messages over `connections`, by peer. One thread uses them at a time.

    `send` never waits: what the kernel does not accept at once is sent during later calls of `receive` and `flush`.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        for one in self._connections.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
        self._unsent: dict[int, bytes] = {}
        self._prefix = memoryview(bytearray(_LENGTH.size))
        self._spin_wait = SpinWait()
        _open_streams.add(self)

    def send(self, peer: int, message: memoryview) -> None:
        """Send `message`, whose memory may be reused at once.

        Raises:
            StreamBroken: the connection is lost.
        """
        prefix = _LENGTH.pack(len(message))
        if peer in self._unsent:
            self._unsent[peer] += prefix + message
            return
        try:
            sent = self._connections[peer].sendmsg((prefix, message), (), _NO_SIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise _broken(peer, error) from error
        if sent < len(prefix) + len(message):
            self._unsent[peer] = (prefix + message)[sent:]

    def receive(self, peer: int, buffer: memoryview, deadline: Deadline) -> int:
        """Receive the next message of `peer` into `buffer`; return its length in bytes.

        Raises:
            StreamBroken: a connection is lost, the deadline has passed, or the message is longer than the buffer.
        """
        self._read(peer, self._prefix, deadline)
        (length,) = _LENGTH.unpack(self._prefix)
        if length > len(buffer):
            raise StreamBroken(peer, f"a message of {length} bytes arrived, but at most {len(buffer)} were expected")
        self._read(peer, buffer[:length], deadline)
        return int(length)

    def flush(self, deadline: Deadline) -> None:
        """Wait until the kernel has accepted all messages.

        Raises:
            StreamBroken: a connection is lost, or the deadline has passed.
        """
        while self._unsent:
            self._wait(next(iter(self._unsent)), None, deadline)

    def _read(self, peer: int, into: memoryview, deadline: Deadline) -> None:
        connection = self._connections[peer]
        while into:
            try:
                count = connection.recv_into(into)
            except BlockingIOError:
                self._wait(peer, connection, deadline)
                continue
            except OSError as error:
                raise _broken(peer, error) from error
            if not count:
                raise StreamBroken(peer, "the connection was closed by the peer")
            into = into[count:]

    def _wait(self, peer: int, connection: socket.socket | None, deadline: Deadline) -> None:
        """Wait for `peer`: for data on `connection`, if any; send unsent messages; return after a moment, too."""
        if deadline.passed:
            raise StreamBroken(peer, "nothing came in time")
        left_ms = int(min(deadline.left_s, _MOST_WAIT_S) * 1000) + 1
        if connection is not None and not self._unsent:
            self._spin_wait.wait(connection.fileno(), -1, left_ms)
            return
        poll = select.poll()
        if connection is not None:
            poll.register(connection, select.POLLIN)
        for receiver in self._unsent:
            one = self._connections[receiver]
            poll.register(one, select.POLLOUT | (select.POLLIN if one is connection else 0))
        poll.poll(left_ms)
        for receiver, message in list(self._unsent.items()):
            try:
                sent = self._connections[receiver].send(message, _NO_SIGNAL)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(receiver, error) from error
            if sent < len(message):
                self._unsent[receiver] = message[sent:]
            else:
                del self._unsent[receiver]

    def shut_down(self) -> None:
        """Wake the thread that waits here, and the peers; any thread may call this. Sent messages still arrive."""
        for one in self._connections.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's descriptors, when no thread uses them any longer; a forked child may call this, too."""
        _close_all(self._connections)


def _broken(peer: int, error: OSError) -> StreamBroken:
    return StreamBroken(peer, f"the connection is lost: {error.strerror or error}")


# A forked child, such as a DataLoader's worker, would keep a dead parent's connections open.
_open_streams: weakref.WeakSet[MessageStreams] = weakref.WeakSet()


def _close_in_child() -> None:
    for streams in list(_open_streams):
        streams.close()


os.register_at_fork(after_in_child=_close_in_child)
