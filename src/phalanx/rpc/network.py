"""Connect workers on several hosts with ZeroMQ over TCP, encrypted and authenticated with the job's key (CURVE).

    worker 1                                     worker 2
    DEALER  -- hello, requests -->               ROUTER       each connects to the port of the other, so each detects
            <-- hello, answers --                             the other's exit at once
    ROUTER                             <--       DEALER
    DEALER  -- pulse -->                         ROUTER       the same in both directions, only for ZeroMQ's heartbeats

One thread owns all sockets. Other threads queue frames for it; large tensors are sent without a copy. Both sides reject
workers without the key. A lost worker never joins again with the same uid. A worker is lost when:

    its process has exited      its kernel closes the connection: at once
    its host does not answer    its kernel has acknowledged no heartbeat for `RPC_PULSE_LOST_S`
    its process is silent       for `RPC_SILENT_S`, though its kernel acknowledges: it is stopped, or busy

The pulse has a connection of its own, because its TCP_USER_TIMEOUT would also end a connection whose receiver is too
busy to read a large tensor.

A worker opens a `DealerConnection` to the port of another worker:

    state        the connection                                              next
    CONNECTING   has sent its hello                                          ACCEPTED, RETRYING, BROKEN
    RETRYING     was closed before the answer: the port keeps few            CONNECTING
                 connections of strangers, and closes the oldest one
                 (`ConnectionGuard`)
    ACCEPTED     has the answer, and is never closed to make room            BROKEN
    BROKEN       has ended: the worker is lost                               none
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import zmq

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.log import get_logger
from phalanx._base.loss_detection import RPC_LAST_ANSWERS_S, RPC_PULSE_LOST_S, RPC_PULSE_S, RPC_SILENT_S
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.admission import Admission, RateLimitedLog
from phalanx._comm.control.connection_guard import ConnectionGuard, connections_allowed, cut, protect
from phalanx._comm.control.key import Key
from phalanx._comm.control.local_socket import BACKLOG
from phalanx.errors import PhalanxError
from phalanx.rpc import wire
from phalanx.rpc.wire import BUFFER, HEAD, Frame
from phalanx.rpc.worker_info import WorkerAddress

_LINGER_S = 1.0
_PIECE_BYTES = 1 << 16  # the parts of a frame are sent in pieces of at most this size
_OPEN_FILES = 4096  # the limit of open files to request, if the system allows it: strangers may flood the port
_MAX_UNAUTHENTICATED = 256  # connections that have not sent a message yet
_COPY_BYTES = 1 << 14  # below this size a copy is cheaper than ZeroMQ's tracking of the memory
_logger = get_logger(__name__)

Arrive = Callable[[Any, Frame], None]
Lost = Callable[[WorkerAddress, str], None]
Welcome = Callable[[WorkerAddress], None]


class NetworkConnection:
    """A `NetworkConnection` sends calls to `peer` or, with `identity`, answers to it."""

    lines = None  # the network's thread reads

    def __init__(self, network: Network, peer: WorkerAddress, identity: bytes = b"") -> None:
        self.peer = peer
        self.identity = identity
        self._network = network

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Queue a frame for the network's thread; tensors must stay unchanged until the answer arrives."""
        views = [wire.view_bytes(one) for one in buffers]
        head = wire.head(kind, call, data, extras, [(view.nbytes, 0) for view in views])
        self._network.post(self, [head, data, extras, *views])

    put = send

    def flush(self) -> None:
        """Do nothing: this connection queues no frames itself."""


class Network:
    """`Network` owns the sockets of one worker, at `address`.

    It calls `arrive(connection, frame)` for each frame, `lost(member, why)` for each lost worker, and `welcome(member)`
    for each new worker.
    """

    def __init__(self, address: str, key: Key, me: WorkerAddress, arrive: Arrive, lost: Lost, welcome: Welcome) -> None:
        self._key = key
        self.me = me  # the address that the hello contains
        self._arrive = arrive
        self._lost = lost
        self._welcome = welcome
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._log = RateLimitedLog(lambda line: _logger.warning("rpc: %s", line))
        self._admission = Admission(self._context, key.member_pair().public, self._log)
        self._router = self._socket(zmq.ROUTER)
        pair = key.coordinator_pair()
        self._router.curve_server = True
        self._router.curve_publickey, self._router.curve_secretkey = pair.public, pair.secret
        self._router.zap_domain = b"phalanx"
        self._router.router_mandatory = True
        protect(self._router, _PIECE_BYTES)
        with listen(Address(address, 0), BACKLOG) as listener:  # ZeroMQ owns the descriptor once `bind` has returned
            self.address = str(Address(address, listener.getsockname()[1]))
            self._guard = ConnectionGuard(
                self._router,
                listener.fileno(),
                self._log,
                max_unauthenticated=_MAX_UNAUTHENTICATED,
                max_open=connections_allowed(_OPEN_FILES),
            )
            self._router.use_fd = listener.fileno()
            self._router.bind(f"tcp://{self.address}")
            listener.detach()
        self._wakeup = Wakeup()
        self._sleeps = False
        self._posted: deque[tuple[NetworkConnection | None, Any]] = deque()
        self._callers: dict[bytes, NetworkConnection] = {}  # by identity
        self._outgoing: dict[int, tuple[NetworkConnection, OutgoingConnections]] = {}  # by uid of the other worker
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-network", daemon=True)
        self._thread.start()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = int(_LINGER_S * 1000)
        made.sndhwm = made.rcvhwm = 0  # unlimited, because the limit of calls in flight also limits the frames
        made.ipv6 = True
        made.handshake_ivl = int(CONNECT_S * 1000)  # for a socket that connects
        made.heartbeat_ivl = made.heartbeat_timeout = int(RPC_SILENT_S * 500)
        return made

    def connect(self, to: WorkerAddress) -> NetworkConnection:
        """Return a connection to a worker. If it cannot be opened, `lost` is called later."""
        connection = NetworkConnection(self, to)
        self.post(connection, None)
        return connection

    def post(self, connection: NetworkConnection | None, parts: Any) -> None:
        """Queue `parts` for the network's thread; `parts` of None open the connection."""
        self._posted.append((connection, parts))
        if self._sleeps:
            self._wakeup.ring()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._admission.socket, zmq.POLLIN)
        poller.register(self._guard.socket, zmq.POLLIN)
        dying: dict[OutgoingConnections, float] = {}  # by connections whose pulse has broken: when to drop each
        while not self._closed:
            self._send_posted(poller)
            self._sleeps = True
            limit_s = min(RPC_LAST_ANSWERS_S if dying else 1.0, RETRY_S if self._connect_again(poller) else 1.0)
            ready: dict[Any, int] = {} if self._posted else dict(poller.poll(int(limit_s * 1000)))
            self._sleeps = False
            if self._wakeup.fileno() in ready:
                self._wakeup.drain()
            if self._admission.socket in ready:
                self._admission.answer(time.monotonic())
            if self._guard.socket in ready or self._guard.is_watching:
                self._guard.read_events(time.monotonic())
            # read answers first: a lost worker may have sent them before it ended
            for connection, one in list(self._outgoing.values()):
                if one.frames.socket in ready:
                    self._read_answers(connection, one)
                if one.pulse.monitor in ready and one.pulse.find_end(time.monotonic()) == BROKE:
                    dying.setdefault(one, time.monotonic() + RPC_LAST_ANSWERS_S)
                if one.frames.monitor in ready and (why := one.frames.find_end(time.monotonic())):
                    self._lose(connection, one, poller, why)
            for one in [one for one, until in dying.items() if until < time.monotonic()]:
                del dying[one]
                for connection in [connection for connection, other in self._outgoing.values() if other is one]:
                    self._lose(connection, one, poller, BROKE)
            self._read_router()
            self._guard.make_room(time.monotonic())
        self._send_posted(poller)
        for connection, one in list(self._outgoing.values()):
            self._drop(connection, one, poller)
        self._admission.close()
        self._guard.close()
        self._router.close()
        self._context.term()

    def _connect_again(self, poller: zmq.Poller) -> bool:
        """Reconnect the connections whose retry is due; return whether any waited for a retry, due or not."""
        now, soon = time.monotonic(), False
        for _, one in self._outgoing.values():
            if one.is_retrying:
                soon = True
                for due in one.due(now):
                    self._unregister(one, poller)
                    due.close(0)
                    due.reconnect()
                    self._register(one, poller)
        return soon

    def _send_posted(self, poller: zmq.Poller) -> None:
        while self._posted:
            connection, parts = self._posted.popleft()
            if connection is None:
                continue
            if parts is None:
                self._open(connection, poller)
                continue
            many = len(parts) > 3 and any(len(part) > _COPY_BYTES for part in parts)
            try:
                pieces = parts
                if max(map(len, parts)) > _PIECE_BYTES:
                    pieces = [piece for part in parts for piece in cut(part, _PIECE_BYTES)]
                if connection.identity:
                    self._router.send_multipart([connection.identity, *pieces], zmq.NOBLOCK, copy=not many)
                elif (found := self._outgoing.get(connection.peer.uid)) is not None:
                    found[1].send(pieces, copy=not many)
            except zmq.ZMQError as error:  # the worker is lost, which our connection to the worker detects
                _logger.debug("rpc: %s: %s", connection.peer, error)

    def _open(self, connection: NetworkConnection, poller: zmq.Poller) -> None:
        peer = connection.peer
        if peer.uid in self._outgoing:
            return
        one = OutgoingConnections(self._socket, self._key, peer.network, self.me.to_json().encode(), time.monotonic())
        self._outgoing[peer.uid] = connection, one
        self._register(one, poller)

    @staticmethod
    def _register(one: OutgoingConnections, poller: zmq.Poller) -> None:
        for source in one.sources:
            poller.register(source, zmq.POLLIN)

    @staticmethod
    def _unregister(one: OutgoingConnections, poller: zmq.Poller) -> None:
        for source in one.sources:
            poller.unregister(source)

    def _read_router(self) -> None:
        while True:
            try:
                identity = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            connection = self._callers.get(identity)
            parts = self._router.recv_multipart() if connection is not None else self._read_and_admit()
            try:
                if connection is not None:
                    self._arrive(connection, _parse(parts))
                elif parts and parts[0] == HELLO and len(parts) == 2:
                    member = WorkerAddress.from_json(parts[1])
                    self._callers[identity] = NetworkConnection(self, member, identity)
                    self._answer(identity, HELLO)
                    self._welcome(member)
                elif parts == [PULSE]:
                    self._answer(identity, PULSE)
            except (ValueError, KeyError, TypeError, IndexError, PhalanxError) as error:
                _logger.error("rpc: a worker of the job sent an invalid message: %s", error)

    def _read_and_admit(self) -> list[bytes]:
        parts = self._router.recv_multipart(copy=False)
        self._guard.admit(parts[0])
        return [part.bytes for part in parts]

    def _answer(self, identity: bytes, greeting: bytes) -> None:
        """Answer a connection's first message: from now on the connection is not closed to make room for others."""
        with contextlib.suppress(zmq.ZMQError):  # the worker has ended
            self._router.send_multipart([identity, greeting], zmq.NOBLOCK)

    def _read_answers(self, connection: NetworkConnection, one: OutgoingConnections) -> None:
        while True:
            try:
                parts = one.frames.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if one.frames.state is not DealerState.ACCEPTED and parts == [HELLO]:
                one.accept()
            else:
                self._arrive(connection, _parse(parts))

    def _lose(self, connection: NetworkConnection, one: OutgoingConnections, poller: zmq.Poller, why: str) -> None:
        if self._outgoing.get(connection.peer.uid) != (connection, one):
            return
        self._read_answers(connection, one)  # the worker sent these answers before it was lost
        self._drop(connection, one, poller)
        self._lost(connection.peer, why)

    def _drop(self, connection: NetworkConnection, one: OutgoingConnections, poller: zmq.Poller) -> None:
        uid = connection.peer.uid
        del self._outgoing[uid]
        for identity in [i for i, caller in self._callers.items() if caller.peer.uid == uid]:
            del self._callers[identity]
        self._unregister(one, poller)
        one.close()

    def close(self) -> None:
        """Send the queued frames, and close the sockets."""
        self._closed = True
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()


def _parse(pieces: Sequence[bytes]) -> Frame:
    """Return the frame whose parts were sent in these pieces.

    Raises:
        PhalanxError: the pieces do not have the sizes that the frame's head announces.
    """
    _, call, num_data, num_extras, num_buffers, kind = HEAD.unpack_from(pieces[0])
    if num_buffers == 0 and len(pieces) == 3 and (len(pieces[1]), len(pieces[2])) == (num_data, num_extras):
        return Frame(kind, call, pieces[1], pieces[2], [])
    rest = iter(pieces)
    head = b"".join(_join_pieces(rest, HEAD.size + BUFFER.size * num_buffers))
    data, extras = b"".join(_join_pieces(rest, num_data)), b"".join(_join_pieces(rest, num_extras))
    sizes = [nbytes for nbytes, _ in BUFFER.iter_unpack(head[HEAD.size :])]
    buffers = [bytearray().join(_join_pieces(rest, nbytes)) for nbytes in sizes]
    if any(True for _ in rest):
        raise PhalanxError("a frame has more pieces than its head announces")
    return Frame(kind, call, data, extras, buffers)


def _join_pieces(pieces: Iterator[bytes], nbytes: int) -> list[bytes]:
    found = list(itertools.islice(pieces, max(1, -(-nbytes // _PIECE_BYTES))))
    if sum(map(len, found)) != nbytes:
        raise PhalanxError(f"a part of a frame has {sum(map(len, found))} bytes, and its head announces {nbytes}")
    return found


CONNECT_S = 20.0
RETRY_S = 0.1
_REFUSED_S = 5.0  # a connection that is closed before it is accepted is retried for this long
HELLO, PULSE = b"hello", b"pulse"  # the first message of a connection, and the answer to it
BROKE = "its connection broke: its process has exited, or its host no longer answers."
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)

MakeSocket = Callable[[int], zmq.Socket[bytes]]


class DealerState(enum.Enum):
    """`DealerState` is the state of a `DealerConnection`; the module's table shows the transitions."""

    CONNECTING = "connecting"
    RETRYING = "retrying"
    ACCEPTED = "accepted"
    BROKEN = "broken"


TRANSITIONS: Mapping[DealerState, Set[DealerState]] = {
    DealerState.CONNECTING: {DealerState.ACCEPTED, DealerState.RETRYING, DealerState.BROKEN},
    DealerState.RETRYING: {DealerState.CONNECTING},
    DealerState.ACCEPTED: {DealerState.BROKEN},
    DealerState.BROKEN: set(),
}


class DealerConnection:
    """A `DealerConnection` is a connection to the port at `address`, whose first message is `hello`."""

    def __init__(self, make_socket: MakeSocket, key: Key, address: str, hello: list[bytes], now: float) -> None:
        self.state = DealerState.CONNECTING
        self.retry_at = 0.0  # when to reconnect, in the state RETRYING
        self._why_broken = ""
        self._make_socket = make_socket
        self._key = key
        self._address = address
        self._hello = hello
        self._refused_at = now + _REFUSED_S
        self._open()

    def _become(self, state: DealerState) -> None:
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    def _open(self) -> None:
        self.socket = self._make_socket(zmq.DEALER)
        self._set_options(self.socket)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(f"tcp://{self._address}")
        self.socket.send_multipart(self._hello)

    def reconnect(self) -> None:
        """Connect again, and send the hello again."""
        self._become(DealerState.CONNECTING)
        self._open()

    def _set_options(self, made: zmq.Socket[bytes]) -> None:
        pair = self._key.member_pair()
        made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
        made.curve_serverkey = self._key.coordinator_pair().public
        made.reconnect_ivl = -1  # never reconnect: a worker that was lost stays lost
        made.connect_timeout = int(CONNECT_S * 1000)

    def accept(self) -> bool:
        """Record that the port has answered the hello; return False if the connection was closed meanwhile."""
        if self.state is not DealerState.CONNECTING:
            return False
        self._become(DealerState.ACCEPTED)
        return True

    def find_end(self, now: float) -> str:
        """Return why the worker at the other end is lost; empty if the connection shows no loss."""
        while True:
            try:
                event = int.from_bytes(self.monitor.recv_multipart(zmq.NOBLOCK)[0][:2], "little")
            except zmq.Again:
                return self._why_broken
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED or self.state in (DealerState.RETRYING, DealerState.BROKEN):
                continue
            self._read_answer()
            self._why_broken = self._why_lost(event, now)
            self.retry_at = now + RETRY_S
            self._become(DealerState.BROKEN if self._why_broken else DealerState.RETRYING)

    def _read_answer(self) -> None:
        """Read the answer to the first message, if nothing else reads it."""

    def _why_lost(self, event: int, now: float) -> str:
        """Return why the worker is lost after this event; empty if the connection should be retried."""
        if self.state is DealerState.ACCEPTED:
            return BROKE
        if event == zmq.EVENT_CLOSED:
            return f"no process accepts connections at {self._address}."
        if now >= self._refused_at:
            return f"connection refused: one of the two workers does not know the job's key ({self._key!r} here)."
        return ""

    def close(self, linger_ms: int | None = None) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class PulseConnection(DealerConnection):
    """A `PulseConnection` carries only heartbeats. It breaks if none is acknowledged within `RPC_PULSE_LOST_S`."""

    def _set_options(self, made: zmq.Socket[bytes]) -> None:
        super()._set_options(made)
        made.heartbeat_ivl = int(RPC_PULSE_S * 1000)
        made.heartbeat_timeout = int(RPC_SILENT_S * 1000)
        made.tcp_maxrt = int(RPC_PULSE_LOST_S * 1000)

    def _read_answer(self) -> None:
        while self.state is DealerState.CONNECTING:
            try:
                if self.socket.recv(zmq.NOBLOCK) == PULSE:
                    self.accept()
            except zmq.Again:
                return


class OutgoingConnections:
    """`OutgoingConnections` are the two connections to one worker: one for frames, one for the pulse."""

    def __init__(self, make_socket: MakeSocket, key: Key, address: str, introduction: bytes, now: float) -> None:
        self.frames = DealerConnection(make_socket, key, address, [HELLO, introduction], now)
        self.pulse = PulseConnection(make_socket, key, address, [PULSE], now)
        # the frames to send once the connection is accepted, and whether ZeroMQ copies each
        self._waiting: list[tuple[list[Any], bool]] = []

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self.frames.socket, self.frames.monitor, self.pulse.monitor)

    def send(self, pieces: list[Any], *, copy: bool) -> None:
        """Send a frame, now or as soon as the other worker has answered the hello."""
        if self.frames.state is DealerState.ACCEPTED:
            self.frames.socket.send_multipart(pieces, zmq.NOBLOCK, copy=copy)
        else:
            self._waiting.append((pieces, copy))

    def accept(self) -> None:
        """Record that the other worker has answered the hello, and send the frames that were waiting for this."""
        if not self.frames.accept():
            return
        waiting, self._waiting = self._waiting, []
        with contextlib.suppress(zmq.ZMQError):  # the connection has ended again, and the monitor reports it
            for pieces, copy in waiting:
                self.send(pieces, copy=copy)

    def due(self, now: float) -> list[DealerConnection]:
        return [one for one in self._retrying() if one.retry_at <= now]

    def _retrying(self) -> list[DealerConnection]:
        return [one for one in (self.frames, self.pulse) if one.state is DealerState.RETRYING]

    @property
    def is_retrying(self) -> bool:
        """Return whether one of the connections waits for a retry."""
        return bool(self._retrying())

    def close(self) -> None:
        self.frames.close()
        self.pulse.close(0)
