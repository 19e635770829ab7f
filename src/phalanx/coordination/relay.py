"""The one connection of a host's ranks to the coordinator, which is on another host: kept by the agent of their host.

    rank ─┐                                        what several ranks ask for in a moment travels together, is
    rank ─┼─ socket of this host ─ relay ─ CURVE ─▶ encrypted once, and is one connection of the coordinator's;
    rank ─┘                                        a value that never changes is fetched once for all of them

The coordinator has a session for each rank, as it has for those that connect to it. Nothing is kept here but the
values of keys that are written once, and who has asked for such a value: a rank that gets no answer asks again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from phalanx.coordination.connection_guard import cut, protect
from phalanx.coordination.dealer import EPOCH_BYTES, EVENTS, open_dealer
from phalanx.coordination.key import Key
from phalanx.coordination.local_socket import BACKLOG, LocalSocket
from phalanx.coordination.pending_call import resend_after
from phalanx.coordination.wire import (
    MAX_FRAME_BYTES,
    VERSION,
    WRITE_ONCE,
    Op,
    Status,
    WireError,
    pack,
    pack_number,
    unpack,
    unpack_number,
)

_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_ROUND_FRAMES, _ROUND_BYTES = 256, 1 << 20  # that are read before they are sent on
_QUEUE_FRAMES = 256  # of a rank that has yet to read
_TICK_S = 0.25
_ENDS_WITH = WRITE_ONCE.encode()
_MAX_KEPT, _KEPT_S = 8, 60.0  # values that never change, and how long one is kept
_OWN = b""  # the route of the relay's own requests


@dataclass
class _Fetch:
    """A value that was asked for, once for all who wait for it: routes and the numbers of their requests."""

    number: int
    asked_at: float = 0.0
    num_asked: int = 0  # since the connection was made
    waiters: dict[tuple[bytes, int], None] = field(default_factory=dict)


class Relay:
    """A relay that runs until `close`: whoever connects to `path` talks to the coordinator at `endpoint`.

    Raises:
        OSError: a socket of this host cannot be had.
    """

    def __init__(self, endpoint: str, key: Key | None) -> None:
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
            self._dealer = open_dealer(self._context, key)
            self._monitor = self._dealer.get_monitor_socket(EVENTS)
            self._dealer.connect(endpoint)
            self._alarm, self._alarm_writer = socket.socketpair()
            undo.pop_all()
        self.path = self._local.path
        self._epoch = b""
        self._routes: dict[bytes, None] = {}
        self._waiting: list[bytes] = []  # frames that the coordinator's side has no room for yet
        self._was_connected = self._is_cut = False
        self._number = 1
        # A connection that says nothing is a stranger's: ranks come only when they have imported torch.
        self._waiting.append(pack(Op.RELAY, 0, _OWN, pack(Op.HELLO, self._number, pack_number(VERSION))))
        self._fetches: dict[bytes, _Fetch] = {}  # by key
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # since when; the value
        self._thread = threading.Thread(target=self._run, name="phalanx-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End: whoever is connected finds the way cut. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = self._stopping = True
        self._alarm_writer.close()
        self._thread.join()
        self._alarm.close()

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
        for each in (self._dealer, self._monitor, self._alarm):
            poller.register(each, _POLLIN)
        while not self._stopping:
            poller.modify(self._router, 0 if self._waiting else _POLLIN)  # ranks wait where the coordinator does
            ready = {each for each, _ in poller.poll(int(_TICK_S * 1000))}
            if self._monitor in ready:
                self._read_events()
            if self._dealer in ready:
                self._read_answers()
            if self._router in ready:
                self._read_requests()
            self._ask_again(time.monotonic())
            self._send()

    # From the ranks to the coordinator.

    def _read_requests(self) -> None:
        fields: list[bytes] = []
        size = 0
        for _ in range(_ROUND_FRAMES):
            if size >= _ROUND_BYTES:
                break
            try:
                route, *pieces = self._router.recv_multipart(_NOBLOCK)
            except zmq.Again:
                break
            frame = b"".join(pieces)
            if len(frame) > MAX_FRAME_BYTES:
                continue  # no client of ours sends so much
            self._routes[route] = None
            if _ENDS_WITH in frame or self._fetches:
                frame = self._without_fetches(route, frame)
            if frame and size + len(frame) > MAX_FRAME_BYTES:
                self._waiting.append(pack(Op.RELAY, 0, *fields))
                fields, size = [], 0
            if frame:
                fields += (route, frame)
                size += len(frame)
        if fields:
            self._waiting.append(pack(Op.RELAY, 0, *fields))

    def _send(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._waiting:
                self._dealer.send_multipart(cut(self._waiting[0]), _NOBLOCK)
                del self._waiting[0]

    # From the coordinator to the ranks.

    def _read_answers(self) -> None:
        for frame in _received(self._dealer):
            epoch = frame[:EPOCH_BYTES]
            if epoch != self._epoch:  # it is another coordinator, and its keys are others
                self._epoch = epoch
                self._kept.clear()
            with contextlib.suppress(WireError):
                for status, _, fields in unpack(frame[EPOCH_BYTES:]):
                    if status == Status.RELAYED:
                        for route, answers in zip(fields[::2], fields[1::2], strict=True):
                            self._hand_over(route, answers)

    def _hand_over(self, route: bytes, answers: bytes) -> None:
        if route == _OWN:
            for message in unpack(answers):
                self._fetched(message.number, message.what, message.fields)
            return
        try:
            self._router.send_multipart((route, *cut(self._epoch + answers)), _NOBLOCK)
        except zmq.Again:
            self._undelivered(route, answers)
        except zmq.ZMQError:
            self._routes.pop(route, None)
            self._undelivered(route, answers)

    def _undelivered(self, route: bytes, answers: bytes) -> None:
        """Tell the coordinator of items of queues whose taker has gone: they are for another one."""
        numbers = [pack_number(message.number) for message in unpack(answers) if message.what == Status.OK]
        if numbers:
            self._waiting.append(pack(Op.UNDELIVERED, 0, route, *numbers))

    # The connection to the coordinator.

    def _read_events(self) -> None:
        for frame in _received(self._monitor):
            event = int.from_bytes(frame[:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._was_connected:
                    self._tell_all(Status.RESUMED)
                    for fetch in self._fetches.values():
                        fetch.asked_at, fetch.num_asked = 0.0, 0
                self._was_connected, self._is_cut = True, False
            elif event == zmq.EVENT_DISCONNECTED and self._was_connected and not self._is_cut:
                self._is_cut = True
                self._tell_all(Status.CUT)

    def _tell_all(self, status: Status) -> None:
        """Tell the ranks how the connection is, as they would see it if it were theirs."""
        if self._epoch:
            for route in list(self._routes):
                self._hand_over(route, pack(status, 0))

    # Values that never change.

    def _without_fetches(self, route: bytes, frame: bytes) -> bytes:
        """Return a rank's frame for the coordinator without the requests that the relay answers itself."""
        try:
            messages = unpack(frame)
        except WireError:
            return frame  # the coordinator says what it makes of it
        kept: list[bytes] = []
        for what, number, fields in messages:
            if what == Op.GET and len(fields) == 1 and fields[0].endswith(_ENDS_WITH):
                self._fetch(fields[0], route, number)
            elif what == Op.CANCEL and len(fields) == 1 and self._cancel(route, fields[0]):
                pass
            else:
                kept.append(pack(what, number, *fields))
        return b"".join(kept)

    def _fetch(self, key: bytes, route: bytes, number: int) -> None:
        found = self._kept.get(key)
        if found is not None:
            self._hand_over(route, pack(Status.OK, number, found[1]))
            return
        fetch = self._fetches.get(key)
        if fetch is None:
            self._number += 1
            fetch = self._fetches[key] = _Fetch(self._number)
        elif (route, number) in fetch.waiters:
            self._hand_over(route, pack(Status.PARKED, number))
        fetch.waiters[route, number] = None

    def _cancel(self, route: bytes, number: bytes) -> bool:
        """Whether the request was one of those that the relay has taken: it is forgotten."""
        for key, fetch in list(self._fetches.items()):
            with contextlib.suppress(WireError):
                if fetch.waiters.pop((route, unpack_number(number)), 0) is None:
                    if not fetch.waiters:
                        del self._fetches[key]
                        self._waiting.append(pack(Op.RELAY, 0, _OWN, pack(Op.CANCEL, 0, pack_number(fetch.number))))
                    return True
        return False

    def _ask_again(self, now: float) -> None:
        for key, fetch in self._fetches.items():
            if now - fetch.asked_at >= resend_after(fetch.num_asked) and not self._is_cut:
                fetch.asked_at, fetch.num_asked = now, fetch.num_asked + 1
                self._waiting.append(pack(Op.RELAY, 0, _OWN, pack(Op.GET, fetch.number, key)))
        while self._kept and now - next(iter(self._kept.values()))[0] > _KEPT_S:
            self._kept.popitem(last=False)

    def _fetched(self, number: int, status: int, fields: list[bytes]) -> None:
        if status == Status.PARKED:
            return
        for key, fetch in list(self._fetches.items()):
            if fetch.number == number:
                del self._fetches[key]
                if status == Status.OK:
                    self._kept[key] = time.monotonic(), fields[0]
                    if len(self._kept) > _MAX_KEPT:
                        self._kept.popitem(last=False)
                for route, theirs in fetch.waiters:
                    self._hand_over(route, pack(status, theirs, *fields))


def _received(source: zmq.Socket[bytes]) -> Iterator[bytes]:
    """Each message that has come."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield b"".join(source.recv_multipart(_NOBLOCK))
