"""Whether every host reaches every other one under the address that it gives: tried before it is used.

Each agent answers, at a port of that address, whoever brings a nonce with a proof that only the job's key allows; so
an address that leads to some other machine (two networks may use the same numbers) does not count. Nothing else can be
had there, and the port is closed once the job starts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.coordination.address import Address
from phalanx.coordination.route import NoRouteError, find_route
from phalanx.deadline import Deadline

_NONCE_BYTES = 32
_ANSWER_S = 2.0
TRY_S = 5.0


@dataclass(frozen=True)
class Target:
    """Another host: its number in the job, what people call it, and where it answers."""

    node: int
    label: str
    address: str
    port: int


class Responder:
    """Answers at `address` until `close`; `port` is where."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(place[0], socket.SOCK_STREAM)
        try:
            self._listener.bind(place[4])
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="phalanx-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more. A second call does nothing."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return
            with visitor:
                try:
                    visitor.settimeout(_ANSWER_S)
                    visitor.sendall(_prove(self._secret, _read(visitor, _NONCE_BYTES)))
                except OSError:
                    continue


def try_all(targets: Sequence[Target], secret: bytes, tell: Callable[[Mapping[int, str]], object]) -> threading.Thread:
    """Try to reach all `targets`, side by side, in a thread; `tell` gets what came back by node, "" where all is "
    "well."""

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
    """A line for each host that could not be reached from another: who tried which address, and what came back."""
    lines = []
    for node, answers in sorted(results.items()):
        for target in targets:
            if answer := answers.get(target.node, ""):
                place = Address(target.address, target.port)
                lines.append(f"  from {labels[node]} to {target.label} at {place}: {answer}")
    return lines
