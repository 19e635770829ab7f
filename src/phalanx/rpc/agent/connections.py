"""Open, watch and close the connections of this worker to the other workers.

    on this host      Unix sockets: the first caller connects to the listener (`unix_links`)
    on another host   ZeroMQ; both workers connect (`network`)
    this worker       frames are queued for its own reader

Received frames are queued for the reader with their connection. The exit of a worker is detected on its sockets and by
watching its process, because a child of the worker may keep the sockets open.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.control.key import Key
from phalanx._comm.symmetric_memory.watch import watch
from phalanx.errors import PeerLostError, PhalanxError
from phalanx.rpc.agent.calls import Callee
from phalanx.rpc.agent.reader import ConnectionReader
from phalanx.rpc.collector import without_collector
from phalanx.rpc.line import LinePool
from phalanx.rpc.network import Network
from phalanx.rpc.options import RpcBackendOptions
from phalanx.rpc.segments import SegmentPool
from phalanx.rpc.unix_connection import UnixConnection
from phalanx.rpc.unix_links import Listener, connect
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers

_logger = get_logger(__name__)
_CONNECT_S = 30.0


class Connections:
    """`Connections` are the connections of one worker, `me`."""

    def __init__(
        self,
        name: str,
        number: int,
        host: str,
        options: RpcBackendOptions,
        reader: ConnectionReader,
        on_lost: Callable[[Callee], None],
    ) -> None:
        """Create the object without connections. The reader calls `on_lost` for each lost worker."""
        self._options = options
        self._reader = reader
        self._on_lost = on_lost
        self.lender = SegmentPool()
        self.listener = Listener(self._welcome, reader)
        self.me = WorkerAddress.of_self(name, number, host, local=self.listener.address)
        self.membership: Workers
        self.network: Network | None = None
        self.peers: dict[int, Callee] = {}
        self._gone: dict[int, str] = {}  # by uid: why the worker is lost
        self._closed = False
        self._open: set[UnixConnection] = set()
        self._releasing: deque[UnixConnection] = deque()
        self._to_self = SelfConnection(self._deliver_to_self)
        self._watched: dict[int, WorkerAddress] = {}

    def start(self, membership: Workers) -> None:
        self.membership = membership
        self.listener.start()

    def peer(self, member: WorkerAddress) -> Callee:
        """Return the `Callee` that tracks this worker's calls to `member`."""
        peer = self.peers.get(member.uid)
        if peer is None:
            made = Callee(member, self._options.max_calls_in_flight, self._options.max_bytes_in_flight)
            peer = self.peers.setdefault(member.uid, made)
            if member.uid == self.me.uid:
                peer.connection = self._to_self
            elif member.uid in self._gone:
                peer.lost = self._gone[member.uid]
                self.peers.pop(member.uid, None)
        return peer

    def why_lost(self, uid: int) -> str:
        """Return why the worker with this uid is lost; "" if it is not lost."""
        return self._gone.get(uid, "")

    @without_collector
    def connect(self, peer: Callee, timeout_s: float = 0.0) -> Any:
        """Return the connection to a worker, and open it if necessary; None if the worker is lost."""
        with peer.connecting:
            if not peer.lost and peer.connection is None:  # another thread may have connected
                self._connect(peer, Deadline.after(min(timeout_s or _CONNECT_S, _CONNECT_S)))
        return peer.connection

    def _connect(self, peer: Callee, deadline: Deadline) -> None:
        if peer.member.host != self.me.host:
            if self.network is None or not peer.member.network:
                who = self.me if self.network is None else peer.member
                self.lose(peer.member, f"it is on another host, and {who} has opened no network port.")
            else:
                peer.connection = self.network.connect(peer.member)
            return
        try:
            sock, fd_sock = connect(peer.member, self.me, deadline)
        except PeerLostError as error:
            self.lose(peer.member, str(error))
        else:
            self._watch(peer.member)
            connection = self._add(sock, fd_sock, peer.member)
            connection.lines = LinePool(connection)
            peer.connection = connection

    # -- workers of this host ------------------------------------------------------------------------------------------

    def _add(self, sock: socket.socket, fd_sock: socket.socket, member: WorkerAddress) -> UnixConnection:
        connection = UnixConnection(sock, fd_sock, self.lender, self._change, self._has_release)
        connection.peer = member
        self._open.add(connection)
        self._reader.watch(sock.fileno(), _ReadyConnection(self, connection))
        return connection

    def _welcome(self, member: WorkerAddress, sock: socket.socket, fd_sock: socket.socket) -> None:
        self.membership.add(member)
        self._watch(member)
        self.peer(member).calls_us = self._add(sock, fd_sock, member)

    def accept_containers(self) -> None:
        """Also accept workers of this host that do not see this process in their /proc."""
        if any(
            one.host == self.me.host and one.process.namespace != self.me.process.namespace
            for one in self.membership.members()
        ):
            self.listener.open_to_containers()

    def read(self, connection: UnixConnection, events: int) -> None:
        """Read from and write to a ready connection."""
        if events & select.EPOLLOUT:
            connection.resume()
        if not events & ~select.EPOLLOUT:
            return
        frames = _read_frames(connection)
        if frames is None:
            self._open.discard(connection)
            self._reader.forget(connection.socket.fileno())
            self.lose_after_reading(connection.peer, "its connection closed.")
            connection.close()
        else:
            for frame in frames:
                self._reader.queue((connection, frame))

    def _change(self, connection: UnixConnection) -> None:
        events = select.EPOLLIN | (select.EPOLLOUT if connection.is_full else 0)
        self._reader.change(connection.socket.fileno(), events)

    def _has_release(self, connection: UnixConnection) -> None:
        self._releasing.append(connection)
        self._reader.wake_by(0.0)

    def send_releases(self) -> None:
        """Notify the other workers that their segments are free again."""
        while self._releasing:
            self._releasing.popleft().flush()

    def _deliver_to_self(self, frame: Frame) -> None:
        self._reader.put((self._to_self, frame))

    # -- lost workers --------------------------------------------------------------------------------------------------

    def _watch(self, member: WorkerAddress) -> None:
        """Watch the process of a worker of this host, because a child of the worker may keep its sockets open."""
        process = member.process
        if process.pid == self.me.process.pid:
            return
        if process.namespace and process.namespace == self.me.process.namespace and self.me.process.has_pidfds:
            try:
                fd = watch.acquire(process).pidfd
            except PhalanxError:  # no descriptor is free: rely on the connection
                return
            if fd in self._watched:
                watch.release(process)
                return
            self._watched[fd] = member
            self._reader.watch(fd, _EndedProcess(self, member, fd))

    def ended(self, member: WorkerAddress, fd: int) -> None:
        """Remove a worker whose process has exited."""
        self._reader.forget(fd)
        self._watched.pop(fd, None)
        watch.release(member.process)
        self.lose_after_reading(member, "its process has exited.")

    def lose_after_reading(self, member: WorkerAddress, why: str) -> None:
        """Remove a lost worker after reading its last answers. The reader calls this."""
        connection = self.peer(member).connection
        if isinstance(connection, UnixConnection) and not connection.closed:
            poll = select.poll()
            poll.register(connection.socket, select.POLLIN)
            while poll.poll(0) and (frames := _read_frames(connection)) is not None:
                for frame in frames:
                    self._reader.queue((connection, frame))
        self._reader.queue(partial(self.lose, member, why))

    def lose(self, member: WorkerAddress, why: str) -> None:
        """Remove a lost worker; the reader then fails the calls to it."""
        peer = self.peer(member)
        if peer.lost or member.uid == self.me.uid:
            return
        peer.lost = self._gone[member.uid] = why
        peer.connection = peer.calls_us = None
        if not self._closed:
            self.membership.forget(member)
        self._reader.put(partial(self._on_lost, peer))  # before the pop: `close` must find the calls somewhere
        self.peers.pop(member.uid, None)

    # -- workers of other hosts ----------------------------------------------------------------------------------------

    def open_network(self, address: str, key: Key) -> None:
        """Accept workers of other hosts that have the key, and add the network address to `me`."""
        self.network = Network(address, key, self.me, self._arrive, self._lose_network_peer, self._on_hello)
        self.me = replace(self.me, network=self.network.address)
        self.network.me = self.me

    def _arrive(self, connection: Any, frame: Frame) -> None:
        self._reader.put((connection, frame))

    def _lose_network_peer(self, member: WorkerAddress, why: str) -> None:
        self._reader.put(partial(self.lose, member, why))

    def _on_hello(self, member: WorkerAddress) -> None:
        """Connect back to a worker of another host, so that its loss is detected."""
        self.membership.add(member)
        peer = self.peer(member)
        if peer.connection is None and not peer.lost and self.network is not None:
            peer.connection = self.network.connect(member)

    # -- the end -------------------------------------------------------------------------------------------------------

    def prepare_fork(self) -> None:
        """Copy tensors received from workers of this host to private memory before a fork."""
        for connection in list(self._open):
            connection.prepare_fork()

    def abandon(self) -> None:
        """Close this worker's sockets in a forked child, without effect on the parent."""
        for connection in list(self._open):
            connection.abandon()
        self.listener.abandon()

    def keep_members(self) -> None:
        """Stop removing lost workers from the members, because this worker is leaving as well."""
        self._closed = True

    def close(self) -> None:
        if self.network is not None:
            self.network.close()
        self.listener.close()
        for connection in list(self._open):
            connection.close()
        for member in self._watched.values():
            watch.release(member.process)
        self._watched = {}
        self.lender.close()


class _ReadyConnection:
    """A `_ReadyConnection` is a connection that the reader polls."""

    def __init__(self, connections: Connections, connection: UnixConnection) -> None:
        self._connections = connections
        self._connection = connection

    def ready(self, events: int) -> None:
        """Read from and write to the connection."""
        self._connections.read(self._connection, events)


class _EndedProcess:
    """An `_EndedProcess` is a process of this host whose exit the reader watches for."""

    def __init__(self, connections: Connections, member: WorkerAddress, fd: int) -> None:
        self._connections = connections
        self._member = member
        self._fd = fd

    def ready(self, events: int) -> None:
        self._connections.ended(self._member, self._fd)


def _read_frames(connection: UnixConnection) -> list[Frame] | None:
    """Return the received frames; None if the connection has closed."""
    try:
        return connection.read() if not connection.closed else None
    except Exception as error:  # the frames are malformed
        _logger.error("rpc: the connection to %s is closed: %s", connection.peer, error)
        return None


class SelfConnection:
    """A `SelfConnection` delivers frames to this worker itself; `peer` is None."""

    peer = None
    lines = None

    def __init__(self, arrive: Callable[[Frame], None]) -> None:
        self._arrive = arrive

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Deliver a frame with copies of its tensors."""
        copies = [numpy.frombuffer(one, dtype=numpy.uint8).copy() for one in buffers]
        self._arrive(Frame(kind, call, data, extras, copies))

    put = send

    def flush(self) -> None:
        """Do nothing: this connection queues no frames."""
