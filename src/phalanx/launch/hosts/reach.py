"""Try whether the hosts reach each other under the addresses that they give, before these are used.

Among up to 33 hosts each tries every other one. Among more it tries some, so that each host is tried from many places.

Each agent answers, at a port of that address, a client's nonce with a proof that only the job's key allows; so an
address that leads to some other machine (two networks may use the same numbers) does not count. Nothing else can be had
there. The port is open only while hosts try each other: the first host asks for it when all have come, and it is closed
before this host's ranks start.

    first host ── answer ──▶ every other one, which opens its port ── answering: port ──▶ first host
               ── reach: all ports ──▶ every other one, which tries them ── reached: what came back ──▶
               ── start (or tried, where somebody has gone meanwhile) ──▶ every other one, which closes its port

Any client can have something signed by asking. The signature is made with a key of its own (`Key.reach_secret`), and so
of no use anywhere else.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.coordination.address import Address
from phalanx.coordination.route import NoRouteError, find_route
from phalanx.deadline import Deadline

_NONCE_BYTES = 32
_ANSWER_S = 2.0
_MOST_TARGETS = 32  # a host tries so many; of more hosts it tries some
_MAX_CONNECTIONS = 128  # at a time; beyond that the oldest is sent away
TRY_S = 5.0


@dataclass(frozen=True)
class Target:
    """`Target` is another host: its number in the job, what people call it, and where it answers."""

    node: int
    label: str
    address: str
    port: int


class Responder:
    """Answers at `address` until `close`; `port` is where. A client that says nothing keeps nobody waiting."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._listener = _bind(address)
        try:
            self._listener.listen(_MAX_CONNECTIONS)
            self._listener.setblocking(False)
            self._alarm, self._alarm_writer = socket.socketpair()
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._connections: OrderedDict[socket.socket, bytes] = OrderedDict()  # with what each has sent of its nonce
        self._thread = threading.Thread(target=self._serve, name="phalanx-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more: the port is closed when this returns. A second call does nothing."""
        self._alarm_writer.close()  # wakes the thread
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._alarm, selectors.EVENT_READ)
            try:
                while True:
                    arrived = {key.fileobj for key, _ in ready.select()}
                    if self._alarm in arrived:
                        return
                    for connection in [connection for connection in self._connections if connection in arrived]:
                        self._receive(connection, ready)
                    if self._listener in arrived:
                        self._admit(ready)
            finally:
                for each in (*self._connections, self._listener, self._alarm):
                    each.close()

    def _admit(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        ready.register(connection, selectors.EVENT_READ)
        self._connections[connection] = b""
        if len(self._connections) > _MAX_CONNECTIONS:
            self._close_connection(next(iter(self._connections)), ready)

    def _receive(self, connection: socket.socket, ready: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            part = connection.recv(_NONCE_BYTES - len(self._connections[connection]))
            nonce = self._connections[connection] = self._connections[connection] + part
            if part and len(nonce) < _NONCE_BYTES:
                return
            if part:
                connection.send(_prove(self._secret, nonce))  # 32 bytes, which an empty buffer takes
        self._close_connection(connection, ready)

    def _close_connection(self, connection: socket.socket, ready: selectors.BaseSelector) -> None:
        ready.unregister(connection)
        del self._connections[connection]
        connection.close()


def choose_targets(node: int, nodes: Sequence[int]) -> set[int]:
    """Return which of `nodes`, in ascending order, host `node` tries: all other hosts, if they are few.

    With more than 32 it tries those that are 1, 2, 4, ... places behind it in the row. So each is tried by as many
    others, in all parts of the row, and a job of a thousand hosts makes ten thousand trials and not a million.
    """
    behind = bisect.bisect_right(nodes, node)
    num_others = len(nodes) - (behind > 0 and nodes[behind - 1] == node)
    if num_others <= _MOST_TARGETS:
        return set(nodes) - {node}
    return {nodes[(behind + (1 << k) - 1) % len(nodes)] for k in range(num_others.bit_length())}


def check_own(address: str) -> None:
    """Return whether a port can be opened at `address`: whether it is one of this host's.

    Raises:
        OSError: it cannot.
    """
    _bind(address).close()


def _bind(address: str) -> socket.socket:
    place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(place[0], socket.SOCK_STREAM)
    try:
        listener.bind(place[4])
    except OSError:
        listener.close()
        raise
    return listener


def try_all(targets: Sequence[Target], secret: bytes, tell: Callable[[Mapping[int, str]], object]) -> threading.Thread:
    """Try to reach all `targets`, side by side, in a thread.

    `tell` gets what came back by node, "" where all is well.
    """

    def work() -> None:
        results: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda t: results.update({t.node: _try(t, secret)}), args=(target,), daemon=True)
            for target in targets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tell(results)

    thread = threading.Thread(target=work, name="phalanx-try-hosts", daemon=True)
    thread.start()
    return thread


def _try(target: Target, secret: bytes) -> str:
    place = Address(target.address, target.port)
    try:
        route = find_route(place, Deadline.after(TRY_S))
    except NoRouteError as error:
        return "; ".join(error.tried.values())
    nonce = os.urandom(_NONCE_BYTES)
    try:
        with socket.create_connection((route.address.host, route.address.port), _ANSWER_S) as connection:
            connection.sendall(nonce)
            answer = _read(connection, hashlib.sha256().digest_size)
    except OSError as error:
        return f"a connection, but no answer ({error.strerror or error})"
    return "" if hmac.compare_digest(answer, _prove(secret, nonce)) else "another machine answers there"


def _prove(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, b"phalanx reach " + nonce, "sha256").digest()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def describe(labels: Sequence[str], results: Mapping[int, Mapping[int, str]], targets: Sequence[Target]) -> list[str]:
    """Return a line for each host that could not be reached from another: who tried which address, and what
    came back.
    """
    by_node = {target.node: target for target in targets}
    lines = []
    for node, answers in sorted(results.items()):  # of a thousand hosts each has tried few
        for tried, answer in sorted(answers.items()):
            if answer and (target := by_node.get(tried)) is not None:
                place = Address(target.address, target.port)
                lines.append(f"  from {labels[node]} to {target.label} at {place}: {answer}")
    return lines
