"""Run the coordinator: one thread reads the sockets, and passes frames to `Coordinator`.

this host      ipc:///proc/<pid>/fd/<number>   a socket without a file; the kernel authenticates the user; no key
other hosts    tcp://<address>                 CURVE with the job's key
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import zmq

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.loss_detection import MEMBER_TIMEOUT_S
from phalanx._base.malloc import release_freed_memory
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.admission import Admission, RateLimitedLog
from phalanx._comm.control.connection_guard import ConnectionGuard, connections_allowed, protect, send_in_pieces
from phalanx._comm.control.key import Key
from phalanx._comm.control.local_socket import BACKLOG, LocalSocket
from phalanx._comm.control.wire import KIND, MAX_ENVELOPE_BYTES, MAX_FRAME_BYTES, AnswerStatus, Op, frames, pack_head
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.session import (
    OTHER_HOSTS,
    THIS_HOST,
    Answer,
    ClientSession,
    DirectRoute,
    RelayedRoute,
    split_answers,
)
from phalanx.errors import AuthenticationError, CoordinationError

if TYPE_CHECKING:
    from phalanx._comm.control.member_connection import MemberConnection


_QUEUE_FRAMES = 32  # maximum number of queued frames of one client in each direction
_ROUND_FRAMES, _ROUND_S = 256, 0.02  # how much is read before answers are sent
_SENDING_S = 0.02  # how long answers are sent to relays before other clients are served
_TICK_S = 0.25
# Plain integers: pyzmq's enumerations take longer than the operations that use them.
_NOBLOCK, _POLLIN, _RCVMORE = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.RCVMORE)
# Each round of the loop has a fixed cost. With many members, heartbeats are therefore batched if no request has arrived
# for _QUIET_S; with very many members, requests are batched, too.
_MANY_MEMBERS, _BEATS_S, _QUIET_S = 32, 0.02, 0.1
_VERY_MANY_MEMBERS, _REQUESTS_S = 256, 0.01
_HEARTBEAT = bytes((Op.HEARTBEAT,))
_MAX_RELAYED = 1024  # maximum number of frames in one message to a relay
_UNBROKEN_S = 3.5  # a connection that received something more recently was not closed for silence
_MAX_UNAUTHENTICATED = 2048  # connections without a message yet; each of a thousand hosts opens two


class Service:
    """A `Service` runs a coordinator until `close`. As a context manager it closes on exit.

    Arguments:
        bind: the address for members on other hosts: HOST:PORT, port 0 for a free one; None opens no port.
        key: the job's key, required with `bind`.
        job: a name with which clients detect that they have reached the wrong job.
        lost_after_s: a member that is silent for this long is lost.
        log: called in the service's thread with a line for the log (refused connections, lost members).
        coordinator: a coordinator that has taken over, with its own `job` and `lost_after_s`; None: a new coordinator.

    Raises:
        AuthenticationError: `bind` without a key.
        CoordinationError: the address cannot be bound.
        ValueError: `lost_after_s` is not positive.
    """

    def __init__(
        self,
        bind: str | None = None,
        key: Key | None = None,
        *,
        job: str = "",
        lost_after_s: float = MEMBER_TIMEOUT_S,
        log: Callable[[str], None] = lambda line: None,
        coordinator: Coordinator | None = None,
    ) -> None:
        if bind is not None and key is None:
            raise AuthenticationError(
                f"the coordinator cannot listen at {bind}: there is no key, and anybody who reaches that "
                "port could join.\n"
                "Create a key once with `phalanx key`, and copy it to the other hosts (or store it in a shared home)."
            )
        if not lost_after_s > 0:
            raise ValueError(f"lost_after_s must be above zero, got {lost_after_s!r}")
        self._listener_to_lines = log
        self.coordinator = coordinator or Coordinator(job=job, lost_after_s=lost_after_s)
        self.address: Address | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.max_sockets = 64
        self._log = RateLimitedLog(self._say)
        self._admission: Admission | None = None
        self._guard: ConnectionGuard | None = None
        self._stopping = False
        self._unused_memory = UnusedMemory()
        self._relayed: dict[
            DirectRoute, list[tuple[ClientSession, list[Answer]]]
        ] = {}  # answers for relays that are not sent yet
        self._asked_at = 0.0  # when the last request arrived that is not a heartbeat
        self._local_socket: LocalSocket | None = None
        self._is_closed = False
        self.local = ""  # the address for processes of this user on this host
        self.problem: BaseException | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._free)
            self._routers = {THIS_HOST: self._open_local()}
            if bind is not None and key is not None:
                self._routers[OTHER_HOSTS] = self._open_remote(Address.parse(bind), key)
            self._wakeup = Wakeup()
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="phalanx-coordinator", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Return the number of refused connections."""
        return self._log.num_refused

    @property
    def num_open(self) -> int:
        """Return the number of open connections of other hosts, authenticated or not."""
        return 0 if self._guard is None else self._guard.num_open

    @property
    def is_serving(self) -> bool:
        """Return whether the service's thread runs, and still sends answers."""
        return self._thread.is_alive()

    def exempt(self, client: MemberConnection) -> None:
        """Exempt a member in this process from the coordinator's timeout, and the coordinator from the member's.

        Both are in the same process, and on a busy machine either may be late.
        """
        self.coordinator.members.exempt(client.member)
        client.is_served = lambda: self.is_serving

    def close(self) -> None:
        """Stop serving without notifying members and waiting clients. A second call does nothing."""
        if self._thread.is_alive():
            self._stopping = True
            self._wakeup.ring()
            self._thread.join()
        if not self._is_closed:
            self._is_closed = True
            self._wakeup.close()
            self._free()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _free(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=0)
        if self._local_socket is not None:
            self._local_socket.close()

    def _open_local(self) -> zmq.Socket[bytes]:
        router = self._router()
        self._local_socket = LocalSocket(router)
        self.local = self._local_socket.path
        return router

    def _open_remote(self, place: Address, key: Key) -> zmq.Socket[bytes]:
        try:
            listener = listen(place, BACKLOG)
        except OSError as error:
            raise CoordinationError(
                f"the coordinator cannot listen at {place}: {error.strerror or error}.\n"
                "Use an address of this host and a free port (port 0 chooses one), or omit the host: :0",
                reason="taken" if error.errno == errno.EADDRINUSE else "",
            ) from None
        pair = key.coordinator_pair()
        self._admission = Admission(self._context, key.member_pair().public, self._log)
        router = self._router()
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = pair.public, pair.secret
        router.zap_domain = b"phalanx"
        router.ipv6 = True
        port = listener.getsockname()[1]
        self.address = Address(place.host, port)
        self._guard = ConnectionGuard(
            router,
            listener.fileno(),
            self._log,
            max_unauthenticated=_MAX_UNAUTHENTICATED,
            max_open=connections_allowed(),
        )
        host = "[::]" if listener.family == socket.AF_INET6 else "0.0.0.0"
        with listener:  # ZeroMQ owns the descriptor once `bind` returns
            router.use_fd = listener.fileno()
            router.bind(f"tcp://{host}:{port}")
            listener.detach()
        return router

    def _router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        protect(router)
        router.rcvhwm = router.sndhwm = _QUEUE_FRAMES
        router.router_mandatory = True  # report whether an answer can be delivered
        router.router_handover = True  # a client that reconnects keeps its identity
        router.backlog = BACKLOG
        # No ZeroMQ heartbeats: an assertion of libzmq 4.3.5 aborts the process if one is due for a closed client with
        # unread messages. The kernel closes the connection of a host that was switched off.
        router.tcp_keepalive, router.tcp_keepalive_idle = 1, 10
        router.tcp_keepalive_intvl, router.tcp_keepalive_cnt = 5, 3
        return router

    def _say(self, line: str) -> None:
        with contextlib.suppress(Exception):  # an error in the callback must not end the job
            self._listener_to_lines(line)

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.problem = error
            self._say(f"the coordinator has ended: {error!r}")
            raise

    def _serve(self) -> None:
        poller = zmq.Poller()
        for router in self._routers.values():
            poller.register(router, _POLLIN)
        if self._admission is not None:
            poller.register(self._admission.socket, _POLLIN)
        if self._guard is not None:
            poller.register(self._guard.socket, _POLLIN)
        poller.register(self._wakeup, _POLLIN)
        routers = frozenset(self._routers.values())
        ticked_at = time.monotonic()
        while not self._stopping:
            wait_s = 0.0 if self._relayed else max(0.0, ticked_at + _TICK_S - time.monotonic())
            ready = {socket for socket, _ in poller.poll(math.ceil(wait_s * 1000))}
            now = time.monotonic()
            if not ready <= routers:
                self._asked_at = now
            if self._guard is not None and (self._guard.socket in ready or self._guard.is_watching):
                self._guard.read_events(now)
            if self._admission is not None and self._admission.socket in ready:
                self._admission.answer(now)
            for listener, router in self._routers.items():
                if router in ready:
                    self._read(listener, router, now)
            if self._guard is not None:
                self._guard.make_room(now)
            if now - ticked_at >= _TICK_S:
                if now - ticked_at > 4 * _TICK_S:  # this process or the machine was suspended: no member is at fault
                    self.coordinator.note_pause(now - ticked_at - _TICK_S, now)
                    if self._guard is not None:
                        self._guard.note_pause(now - ticked_at - _TICK_S, now)
                ticked_at = now
                for line in (*self.coordinator.tick(now), *self._lose_disconnected(now)):
                    self._say(line)
                if now - self._asked_at > _QUIET_S:
                    self._unused_memory.give_back()
            self._send()
            if not self._relayed and (gathering_s := self._gathering_s(now)):
                time.sleep(gathering_s)

    def _gathering_s(self, now: float) -> float:
        """Return how many seconds to batch incoming requests; no client waits for the answer to a heartbeat."""
        num_members = len(self.coordinator.members)
        if num_members > _MANY_MEMBERS and now - self._asked_at > _QUIET_S:
            return _BEATS_S
        return _REQUESTS_S if num_members > _VERY_MANY_MEMBERS else 0.0

    def _lose_disconnected(self, now: float) -> list[str]:
        ended = () if self._guard is None else self._guard.pop_ended(now)
        routes = [(DirectRoute(OTHER_HOSTS, identity), since - _UNBROKEN_S) for identity, since in ended]
        return [line for route in routes for line in self.coordinator.lose_disconnected(*route)]

    def _read(self, listener: int, router: zmq.Socket[bytes], now: float) -> None:
        recv = router.recv
        handle = self.coordinator.handle
        ends_at = time.monotonic() + _ROUND_S  # fair, because ZeroMQ reads from its connections in turn
        for _ in range(_ROUND_FRAMES):
            if time.monotonic() >= ends_at:
                return
            try:
                route = DirectRoute(listener, recv(_NOBLOCK))
            except zmq.Again:
                return
            frame = self._read_frame(listener, router, route.identity)
            if frame[KIND] != _HEARTBEAT:
                self._asked_at = now
            try:
                fine = handle(route, frame, now)
            except Exception as error:  # our bug; it must not end the job
                self._say(f"a request failed because of a bug in Phalanx: {error!r}")
                continue
            if not fine:
                self._log.report(f"{self.coordinator.who(route)} sends malformed messages", now)

    def _read_frame(self, listener: int, router: zmq.Socket[bytes], identity: bytes) -> bytes:
        """Return the frame after a route; of a message that is too long, return a malformed frame instead.

        ZeroMQ delivers messages completely or not at all, so no part is waited for.
        """
        guard = self._guard
        if guard is not None and guard.needs_admission and listener == OTHER_HOSTS:
            first = router.recv(copy=False)
            guard.admit(first, identity)
            frame = first.bytes
        else:
            frame = router.recv()
        if not router.get(_RCVMORE):
            return frame
        pieces, nbytes = [frame], len(frame)
        while router.get(_RCVMORE):
            piece = router.recv()
            nbytes += len(piece)
            if nbytes <= MAX_ENVELOPE_BYTES:
                pieces.append(piece)
        return b"".join(pieces) if nbytes <= MAX_ENVELOPE_BYTES else b"\0"

    def _send(self) -> None:
        coordinator = self.coordinator
        for session, answers in coordinator.pop_outgoing():
            route = session.route
            if isinstance(route, RelayedRoute):
                self._relayed.setdefault(route.relay, []).append((session, answers))
                continue
            left = frames(answers)
            try:
                while left:
                    frame = b"".join((coordinator.epoch, *split_answers(left[0])))
                    send_in_pieces(self._routers[route.listener], frame, route.identity)
                    del left[0]
            except zmq.Again:  # the client's queue is full, because it does not read
                coordinator.requeue_answers(session, [answer for frame in left for answer in frame])
            except zmq.ZMQError:  # the client has left; if it returns, it repeats its requests
                coordinator.undelivered(session, [answer for frame in left for answer in frame])
        ends_at = time.monotonic() + _SENDING_S
        while self._relayed:  # free each answer after sending: ZeroMQ has a copy
            relay = next(iter(self._relayed))
            self._send_to_relay(relay, self._relayed.pop(relay))
            if time.monotonic() >= ends_at:  # serve members between the answers to a thousand hosts
                break

    def _send_to_relay(self, relay: DirectRoute, batch: list[tuple[ClientSession, list[Answer]]]) -> None:
        """Send answers for several processes of a host, in as few messages as the limits allow."""
        coordinator = self.coordinator
        left = [(session, frame) for session, answers in batch for frame in frames(answers)]
        try:
            while left:
                number = _fitting([sum(map(len, frame)) for _, frame in left])
                envelope = b"".join((coordinator.epoch, *_pack_for_relay(left[:number])))
                send_in_pieces(self._routers[relay.listener], envelope, relay.identity)
                self._unused_memory.note_sent(len(envelope))
                del left[:number]
        except zmq.Again:
            for session, frame in reversed(left):
                coordinator.requeue_answers(session, frame)
        except zmq.ZMQError:
            for session, frame in left:
                coordinator.undelivered(session, frame)


def _pack_for_relay(batch: list[tuple[ClientSession, list[Answer]]]) -> Iterator[bytes]:
    """Yield the parts of one message to a relay, with a frame for each of these sessions."""
    sizes = [size for session, frame in batch for size in (len(session.route[-1]), sum(map(len, frame)))]
    yield pack_head(AnswerStatus.RELAYED, 0, sizes)
    for session, frame in batch:
        yield session.route[-1]
        yield from split_answers(frame)


def _fitting(sizes: list[int]) -> int:
    """Return how many frames of these sizes fit into one message, at least one."""
    number, size = 1, sizes[0]
    while number < min(len(sizes), _MAX_RELAYED) and size + sizes[number] <= MAX_FRAME_BYTES:
        size += sizes[number]
        number += 1
    return number


_WORTH_BYTES = 16 << 20


class UnusedMemory:
    """`UnusedMemory` counts sent bytes; `give_back` returns freed memory to the system if many bytes were sent.

    Cost: `give_back` takes 10 ms after hundreds of megabytes, and nothing otherwise.
    """

    def __init__(self) -> None:
        self._sent_bytes = 0

    def note_sent(self, nbytes: int) -> None:
        """Count a sent message of `nbytes` bytes."""
        self._sent_bytes += nbytes

    def give_back(self) -> None:
        """Return unused memory to the system, if much was sent since memory was last returned."""
        if self._sent_bytes >= _WORTH_BYTES:
            self._sent_bytes = 0
            release_freed_memory()
