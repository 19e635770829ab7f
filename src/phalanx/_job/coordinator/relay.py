"""The relay in a host's agent connects all ranks of the host to the coordinator on another host, as one client.

    rank ─┐                                        simultaneous requests of ranks are one message, which is
    rank ─┼─ socket of this host ─ relay ─ CURVE ─▶ encrypted once, over one connection to the coordinator;
    rank ─┘                                        identical requests are sent once (`host_requests`)

The coordinator has a session for each rank, as if the rank were connected directly. A rank repeats unanswered requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._comm.control.connection_guard import protect, send_in_pieces
from phalanx._comm.control.dealer import EPOCH_BYTES, EVENTS, open_dealer
from phalanx._comm.control.key import Key
from phalanx._comm.control.local_socket import BACKLOG, LocalSocket
from phalanx._comm.control.wire import MAX_FRAME_BYTES, AnswerStatus, Op, pack, pack_number, unpack
from phalanx._job.coordinator.host_requests import HostRequests

_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_ROUND_FRAMES, _ROUND_BYTES = 256, 1 << 20  # how much is read before it is forwarded
_QUEUE_FRAMES = 256  # maximum number of frames queued for a rank that does not read
_TICK_S = 0.25


class Relay:
    """A `Relay` connects clients of the socket at `path` to the coordinator at `endpoint`, until `close`.

    `member` returns the member that owns the relay, or -1: clients of the relay are lost with that member.

    Raises:
        OSError: a socket cannot be created.
    """

    def __init__(self, endpoint: str, key: Key | None, member: Callable[[], int] = lambda: -1) -> None:
        self._member, self._sent_member = member, -1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._is_closed = False
        self._stopping = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.linger = 0
            protect(self._router)
            self._router.rcvhwm = self._router.sndhwm = _QUEUE_FRAMES
            self._router.router_mandatory = self._router.router_handover = True
            self._router.backlog = BACKLOG
            self._local = LocalSocket(self._router)
            undo.callback(self._local.close)
            # The agent, which owns this relay, is a member: its own heartbeats detect a hanging coordinator.
            self._dealer = open_dealer(self._context, key, heartbeat_s=0.0)
            self._monitor = self._dealer.get_monitor_socket(EVENTS)
            self._dealer.connect(endpoint)
            self._wakeup = Wakeup()
            undo.pop_all()
        self.path = self._local.path
        self._epoch = b""
        # the epoch shown to the ranks: they do not notice that another coordinator has taken over
        self._shown_epoch = b""
        self._redirected: tuple[str, bytes] | None = None  # the endpoint and epoch that `redirect` has set
        self._former_epochs: set[bytes] = set()
        self._endpoint = endpoint
        self._routes: dict[bytes, None] = {}
        self._waiting: list[bytes] = []  # frames for which the send queue to the coordinator has no room yet
        self._was_connected = self._is_cut = False
        self._requests = HostRequests()
        self._thread = threading.Thread(target=self._run, name="phalanx-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the relay, which disconnects the ranks. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = self._stopping = True
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()

    def redirect(self, endpoint: str, epoch: bytes) -> None:
        """Continue with the coordinator that has taken over; it has the ranks' sessions and results."""
        self._redirected = endpoint, epoch
        self._wakeup.ring()

    def _follow(self, endpoint: str, epoch: bytes) -> None:
        self._dealer.disconnect(self._endpoint)
        self._former_epochs.add(self._epoch)
        self._endpoint, self._epoch, self._is_cut = endpoint, epoch, True
        self._dealer.connect(endpoint)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._local.close()
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._dealer, self._monitor, self._wakeup):
            poller.register(each, _POLLIN)
        while not self._stopping:
            poller.modify(
                self._router, 0 if self._waiting else _POLLIN
            )  # backpressure: ranks wait while the coordinator does not read
            ready = {each for each, _ in poller.poll(int(_TICK_S * 1000))}
            if self._wakeup.fileno() in ready:
                self._wakeup.drain()
            redirected, self._redirected = self._redirected, None
            if redirected is not None:
                self._read_answers()  # the last answers of the former coordinator
                self._follow(*redirected)
            if self._monitor in ready:
                self._read_events()
            if self._dealer in ready:
                self._read_answers()
            if self._router in ready:
                self._read_requests()
            now = time.monotonic()
            if not self._is_cut:
                self._requests.ask_again(now)
            self._answer()
            self._send_member()
            self._waiting += self._requests.pop_outgoing(now)
            self._send()

    def _send_member(self) -> None:
        member = self._member()
        if member not in (-1, self._sent_member) and self._was_connected and not self._is_cut:
            self._sent_member = member
            self._waiting.append(pack(Op.RELAY_OWNER, 0, pack_number(member)))

    # From the ranks to the coordinator.

    def _read_requests(self) -> None:
        size = 0
        for _ in range(_ROUND_FRAMES):
            if size >= _ROUND_BYTES:
                break
            try:
                route, *pieces = self._router.recv_multipart(_NOBLOCK)
            except zmq.Again:
                break
            frame = b"".join(pieces)
            size += len(frame)
            if len(frame) > MAX_FRAME_BYTES:
                continue  # no client of Phalanx sends more
            self._routes[route] = None
            self._requests.receive_requests(route, frame)

    def _send(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._waiting:
                send_in_pieces(self._dealer, self._waiting[0])
                del self._waiting[0]

    # From the coordinator to the ranks.

    def _read_answers(self) -> None:
        now = time.monotonic()
        for frame in _received(self._dealer):
            epoch = frame[:EPOCH_BYTES]
            if epoch in self._former_epochs:
                continue
            if epoch != self._epoch:
                self._epoch = self._shown_epoch = epoch
                self._requests.restart()
            self._shown_epoch = self._shown_epoch or epoch
            with contextlib.suppress(ValueError, IndexError):  # the sender is not a coordinator of Phalanx
                self._requests.receive_answers(frame[EPOCH_BYTES:], now)

    def _answer(self) -> None:
        for route, answers in self._requests.pop_answers():
            self._send_answers(route, answers)

    def _send_answers(self, route: bytes, answers: bytes) -> None:
        try:
            send_in_pieces(self._router, self._shown_epoch + answers, route)
        except zmq.Again:
            self._report_undelivered(route, answers)
        except zmq.ZMQError:  # the process has ended
            self._routes.pop(route, None)
            self._requests.drop(route)
            self._report_undelivered(route, answers)

    def _report_undelivered(self, route: bytes, answers: bytes) -> None:
        """Report to the coordinator which answers did not reach their rank, so that other ranks get popped items."""
        numbers = [pack_number(message.number) for message in unpack(answers) if message.what == AnswerStatus.OK]
        if numbers:
            self._waiting.append(pack(Op.UNDELIVERED, 0, route, *numbers))

    # The connection to the coordinator.

    def _read_events(self) -> None:
        for frame in _received(self._monitor):
            event = int.from_bytes(frame[:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._was_connected:
                    self._notify_all(AnswerStatus.RESUMED)
                    self._requests.resume()
                self._was_connected, self._is_cut, self._sent_member = True, False, -1
            elif event == zmq.EVENT_DISCONNECTED and self._was_connected and not self._is_cut:
                self._is_cut = True
                self._notify_all(AnswerStatus.CUT)

    def _notify_all(self, status: AnswerStatus) -> None:
        """Notify the ranks of a change of the connection, as if it were their own."""
        if self._shown_epoch:
            for route in list(self._routes):
                self._send_answers(route, pack(status, 0))


def _received(source: zmq.Socket[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield b"".join(source.recv_multipart(_NOBLOCK))
