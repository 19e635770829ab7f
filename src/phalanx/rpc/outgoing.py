"""Connect a worker to a worker of another host: connect again until it is welcome, and watch until it breaks.

    connect ──► hello ──► welcome ──► frames ──► it broke: that worker is lost
       ▲           │
       ╰── closed ─╯  the other worker keeps so many connections of strangers only, and closes the oldest (see
                      `ConnectionGuard`): one that it has answered is no stranger's, and is never closed

Frames go over one of them, once it is welcome; the other has ZeroMQ's heartbeats alone. The network's thread uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import zmq

from phalanx._base.loss_detection import RPC_PULSE_LOST_S, RPC_PULSE_S, RPC_SILENT_S
from phalanx._comm.control.key import Key

CONNECT_S = 20.0
RETRY_S = 0.1
_REFUSED_S = 5.0  # a connection that is closed before it is welcome is retried for so long
HELLO, PULSE = b"hello", b"pulse"  # the first message of a connection, and the answer to it
BROKE = "its connection broke: its process has ended, or its host does not answer any more."
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)

MakeSocket = Callable[[int], zmq.Socket[bytes]]


class Connection:
    """`Connection` is one connection to the port at `address`, where `hello` introduces it."""

    def __init__(self, make_socket: MakeSocket, key: Key, address: str, hello: list[bytes], now: float) -> None:
        self.is_welcome = False
        self.retry_at: float | None = None  # when to `open` it again
        self._make_socket = make_socket
        self._key = key
        self._address = address
        self._hello = hello
        self._refused_at = now + _REFUSED_S
        self.open()

    def open(self) -> None:
        """Connect, and send the hello."""
        self.retry_at = None
        self.socket = self._make_socket(zmq.DEALER)
        self._set_options(self.socket)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(f"tcp://{self._address}")
        self.socket.send_multipart(self._hello)

    def _set_options(self, made: zmq.Socket[bytes]) -> None:
        pair = self._key.member_pair()
        made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
        made.curve_serverkey = self._key.coordinator_pair().public
        made.reconnect_ivl = -1  # a worker that was lost stays lost
        made.connect_timeout = int(CONNECT_S * 1000)

    def find_end(self, now: float) -> str:
        """Return why the worker at the other end is lost, if the connection shows it; empty if it goes on.

        If the connection was closed before it was welcome, `retry_at` is set: that is no end yet.
        """
        while True:
            try:
                event = int.from_bytes(self.monitor.recv_multipart(zmq.NOBLOCK)[0][:2], "little")
            except zmq.Again:
                return ""
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                continue
            if self._was_welcome():
                return BROKE
            if event == zmq.EVENT_CLOSED:
                return f"nobody answers at {self._address}."
            if now >= self._refused_at:
                return f"it refuses us, or is refused: one of the two does not know the job's key ({self._key!r} here)."
            self.retry_at = now + RETRY_S
            return ""

    def _was_welcome(self) -> bool:
        return self.is_welcome

    def close(self, linger_ms: int | None = None) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class Pulse(Connection):
    """`Pulse` is a connection for heartbeats alone. It breaks when the other host acknowledges none for some time."""

    def _set_options(self, made: zmq.Socket[bytes]) -> None:
        super()._set_options(made)
        made.heartbeat_ivl = int(RPC_PULSE_S * 1000)
        made.heartbeat_timeout = int(RPC_SILENT_S * 1000)
        made.tcp_maxrt = int(RPC_PULSE_LOST_S * 1000)

    def _was_welcome(self) -> bool:
        while not self.is_welcome:
            try:
                self.is_welcome = self.socket.recv(zmq.NOBLOCK) == PULSE
            except zmq.Again:
                return False
        return True


class Outgoing:
    """`Outgoing` has the two connections to one worker."""

    def __init__(self, make_socket: MakeSocket, key: Key, address: str, introduction: bytes, now: float) -> None:
        self.frames = Connection(make_socket, key, address, [HELLO, introduction], now)
        self.pulse = Pulse(make_socket, key, address, [PULSE], now)
        # frames to send once it is welcome, and whether each was copied
        self._waiting: list[tuple[list[Any], bool]] = []

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self.frames.socket, self.frames.monitor, self.pulse.monitor)

    def send(self, pieces: list[Any], *, copy: bool) -> None:
        """Send a frame, now or as soon as the other worker has answered the hello."""
        if self.frames.is_welcome:
            self.frames.socket.send_multipart(pieces, zmq.NOBLOCK, copy=copy)
        else:
            self._waiting.append((pieces, copy))

    def welcome(self) -> None:
        """Note that the other worker has answered the hello, and send what has waited for that."""
        self.frames.is_welcome = True
        waiting, self._waiting = self._waiting, []
        with contextlib.suppress(zmq.ZMQError):  # it is gone again, which the monitor tells
            for pieces, copy in waiting:
                self.send(pieces, copy=copy)

    def due(self, now: float) -> list[Connection]:
        return [one for one in (self.frames, self.pulse) if one.retry_at is not None and one.retry_at <= now]

    @property
    def is_retrying(self) -> bool:
        """Return whether a connection is to be reconnected soon."""
        return self.frames.retry_at is not None or self.pulse.retry_at is not None

    def close(self) -> None:
        self.frames.close()
        self.pulse.close(0)
