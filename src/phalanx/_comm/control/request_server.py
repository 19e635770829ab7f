"""Answer one short request per connection, from any client, with bounded resources.

    accepted ──► reading ──a whole request──► answering ──all is sent──► closed
                    ╰─── too many others, or time is up ───┴──► closed

Clients cost no threads, and a bounded number of descriptors and bytes: each of the two states has room for 64
connections, each with part of a request or of an answer. If there are more, one is closed: in "reading", the
oldest; in "answering", the one whose client has received nothing for longest. To make room, the server closes no
connection whose answer is being made, and none in its first quarter of a second: until then, new connections wait in
the kernel's backlog. On Linux, a connection that sends nothing also waits there for its first five seconds.
"""

from __future__ import annotations

import math
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx._base.ipc.wakeup import Wakeup

MOST_OPEN = 64  # in each state
BACKLOG = 128
_REQUEST_S = 10.0  # the time limit for receiving a whole request
_ANSWER_S = 60.0  # the time limit for sending its answer
_GRACE_S = 0.25  # the time that a client on a busy machine may need to send its request after connecting
_CHECK_S = 1.0
_PAUSE_S = 0.05  # while the process has no descriptor left

Answer = bytes | Callable[[], bytes]


class RequestServer:
    """A `RequestServer` serves the connections of `listener`, which it owns, until `close`.

    Arguments:
        answer: called with the bytes received so far on a connection. It returns None while the request is incomplete,
            then the answer, or a function that makes a slow answer. Such functions run in another thread, one by one.
        most_bytes: the maximum size of a request; a connection that has sent this much of an incomplete one is closed.
        name: the name of the thread, and the prefix of the name of the thread that makes slow answers.
    """

    def __init__(
        self, listener: socket.socket, answer: Callable[[bytes], Answer | None], *, most_bytes: int, name: str
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._most_bytes = most_bytes
        self._connections: dict[int, _Connection] = {}  # by descriptor
        # by descriptor, the oldest first: when the connection entered the state
        self._reading: dict[int, float] = {}
        self._answering: dict[int, float] = {}
        self._wanted: queue.SimpleQueue[tuple[_Connection, Callable[[], bytes]] | None] = queue.SimpleQueue()
        self._made: deque[tuple[_Connection, bytes]] = deque()
        self._closed = False
        self._name = name
        self._maker: threading.Thread | None = None
        listener.setblocking(False)
        try:
            self._wakeup = Wakeup()
        except OSError:
            listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: the port is closed when this returns. A second call does nothing.

        This does not wait for an answer that is being made.
        """
        self._closed = True
        self._wanted.put(None)
        self._wakeup.ring()
        self._thread.join()

    # -- the thread of the connections ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._closed:
                room_s = self._room_s()
                self._watch_listener(room_s == 0.0)
                self._serve_once(
                    self._selector.select(min(room_s or _CHECK_S, _CHECK_S) if self._connections else None)
                )
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            for each in (self._selector, self._listener, self._wakeup):
                each.close()

    def _serve_once(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            connection = self._connections.get(key.fd)
            if connection is None:
                continue
            if events & selectors.EVENT_READ:
                self._receive(connection)
            else:
                self._send(connection)
        arrived = {key.fileobj for key, _ in ready}
        if self._wakeup in arrived:
            self._wakeup.drain()
        while self._made:
            connection, answer = self._made.popleft()
            if self._connections.get(connection.fd) is connection:
                connection.left = memoryview(answer)
                self._send(connection)
                self._make_room()
        if self._listener in arrived:
            self._accept()
        now = time.monotonic()
        for waiting, limit_s in ((self._reading, _REQUEST_S), (self._answering, _ANSWER_S)):
            while waiting and now - next(iter(waiting.values())) > limit_s:
                self._close(next(iter(waiting)))

    def _room_s(self) -> float:
        """Return the seconds until the next connection can be accepted; infinity while 64 answers are being made."""
        if sum(not self._connections[fd].left for fd in self._answering) >= MOST_OPEN:
            return math.inf
        if len(self._reading) < MOST_OPEN:
            return 0.0
        return max(0.0, next(iter(self._reading.values())) + _GRACE_S - time.monotonic())

    def _watch_listener(self, watch: bool) -> None:
        watched = self._listener in self._selector.get_map()
        if watched and not watch:
            self._selector.unregister(self._listener)
        elif watch and not watched:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the client has disconnected
            return
        except OSError:  # no descriptor is free
            if self._reading:
                self._close(next(iter(self._reading)))
            else:
                time.sleep(_PAUSE_S)
            return
        try:
            accepted.setblocking(False)
        except OSError:  # the client has disconnected
            accepted.close()
            return
        connection = _Connection(accepted)
        self._connections[connection.fd] = connection
        self._reading[connection.fd] = time.monotonic()
        self._selector.register(accepted, selectors.EVENT_READ)
        self._receive(connection)  # read first: if the request is already complete, no connection need be closed
        if len(self._reading) > MOST_OPEN:
            oldest = next(iter(self._reading))
            self._receive(self._connections[oldest])
            if oldest in self._reading:
                self._close(oldest)

    def _receive(self, connection: _Connection) -> None:
        try:
            part = connection.socket.recv(self._most_bytes - len(connection.request))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        connection.request += part
        answer = self._answer(connection.request) if part else None
        if answer is not None:
            self._start_answer(connection, answer)
        elif not part or len(connection.request) >= self._most_bytes:
            self._close(connection.fd)

    def _start_answer(self, connection: _Connection, answer: Answer) -> None:
        del self._reading[connection.fd]
        self._selector.unregister(connection.socket)
        self._answering[connection.fd] = time.monotonic()
        connection.request = b""
        if isinstance(answer, bytes):
            connection.left = memoryview(answer)
            self._send(connection)
        else:
            self._queue_answer(connection, answer)
        self._make_room()

    def _make_room(self) -> None:
        while len(self._answering) > MOST_OPEN:
            ready = [one for fd in self._answering if (one := self._connections[fd]).left]
            if not ready:
                return
            self._close(min(ready, key=lambda one: one.received_at).fd)

    def _send(self, connection: _Connection) -> None:
        try:
            connection.left = connection.left[connection.socket.send(connection.left) :]
            connection.received_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            connection.left = memoryview(b"")
        if not connection.left:
            self._close(connection.fd)
        elif connection.fd not in self._selector.get_map():
            self._selector.register(connection.socket, selectors.EVENT_WRITE)

    def _close(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._reading.pop(fd, None)
        self._answering.pop(fd, None)
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        connection.socket.close()

    # -- the thread that makes answers ---------------------------------------------------------------------------------

    def _queue_answer(self, connection: _Connection, make: Callable[[], bytes]) -> None:
        if self._maker is None:
            self._maker = threading.Thread(target=self._make_answers, name=f"{self._name}-answers", daemon=True)
            self._maker.start()
        self._wanted.put((connection, make))

    def _make_answers(self) -> None:
        for connection, make in iter(self._wanted.get, None):
            if self._closed:
                return
            if self._connections.get(connection.fd) is connection:
                self._made.append((connection, make()))
                self._wakeup.ring()


class _Connection:
    """A `_Connection` has the received part of its request, and the unsent part of its answer."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.fd = accepted.fileno()
        self.request = b""
        self.left = memoryview(b"")
        self.received_at = 0.0  # when the client last received a part of the answer
