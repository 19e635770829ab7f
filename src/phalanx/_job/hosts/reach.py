"""Test whether the hosts reach each other at their published addresses, before the ranks use those addresses.

Each host tries all others, up to 32. With more hosts, each tries a subset, so that every host is tried from several.

Each agent opens a port at its address, and answers a client's nonce with an HMAC that requires the job's key. So
another machine with the same address (two networks may use the same addresses) is not mistaken for the host. The port
serves nothing else. It is open only while hosts try each other: from the first host's request, when all have joined,
until this host's ranks start.

    first host ── answer ──▶ every other host, which opens its port ── answering: port ──▶ first host
               ── reach: all ports ──▶ every other host, which tries them ── reached: the results ──▶
               ── start (or tried, if a host has left meanwhile) ──▶ every other host, which closes its port

Any client can obtain HMACs, so their secret (`Key.reach_secret`) is used for nothing else.
"""

from __future__ import annotations

import bisect
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx._base.deadline import Deadline
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.request_server import BACKLOG, RequestServer
from phalanx._comm.control.route import NoRouteError, find_route

if TYPE_CHECKING:  # the ssh starter imports this module, and must not pay for ZeroMQ
    from phalanx._comm.control.key import Key
    from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage

_NONCE_BYTES = 32
_ANSWER_S = 2.0
_MOST_TARGETS = 32  # a host tries all others up to this number; with more, it tries about log2 of their number
TRY_S = 5.0


@dataclass(frozen=True)
class ReachTarget:
    """A `ReachTarget` is another host: its number in the job, its label, its address and its port."""

    node: int
    label: str
    address: str
    port: int


class Responder:
    """A `Responder` answers at `address` until `close`; `port` is its port. A silent client does not delay others."""

    def __init__(self, address: str, secret: bytes) -> None:
        listener = listen(Address(address, 0), BACKLOG)
        self.port: int = listener.getsockname()[1]

        def answer(nonce: bytes) -> bytes | None:
            return _prove(secret, nonce) if len(nonce) == _NONCE_BYTES else None

        self._server = RequestServer(listener, answer, most_bytes=_NONCE_BYTES, name="phalanx-reach")

    def close(self) -> None:
        """Stop answering: the port is closed when this returns. A second call does nothing."""
        self._server.close()


def choose_targets(node: int, nodes: Sequence[int]) -> set[int]:
    """Return which of `nodes`, in ascending order, host `node` tries: all other hosts, if they are few.

    With more than 32 others, it tries those that are 1, 2, 4, ... places after it, cyclically. So each host is tried by
    equally many others, from all parts of the list. A job of a thousand hosts makes ten thousand trials, not a million.
    """
    behind = bisect.bisect_right(nodes, node)
    num_others = len(nodes) - (behind > 0 and nodes[behind - 1] == node)
    if num_others <= _MOST_TARGETS:
        return set(nodes) - {node}
    return {nodes[(behind + (1 << k) - 1) % len(nodes)] for k in range(num_others.bit_length())}


def check_own(address: str) -> None:
    """Check that `address` is one of this host's, by opening a port there.

    Raises:
        OSError: no port can be opened there.
    """
    listen(Address(address, 0), 1).close()


def try_all(
    targets: Sequence[ReachTarget], secret: bytes, report: Callable[[Mapping[int, str]], object]
) -> threading.Thread:
    """Start a thread that tries to reach all `targets` concurrently, and return it.

    The thread calls `report` with the error of each node, "" for success.
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
        report(results)

    thread = threading.Thread(target=work, name="phalanx-try-hosts", daemon=True)
    thread.start()
    return thread


def _try(target: ReachTarget, secret: bytes) -> str:
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


def describe(
    labels: Sequence[str], results: Mapping[int, Mapping[int, str]], targets: Sequence[ReachTarget]
) -> list[str]:
    """Return a line for each failed trial: which host tried which other host, at which address, and the error."""
    by_node = {target.node: target for target in targets}
    lines = []
    for node, answers in sorted(results.items()):  # with many hosts, each has tried only some
        for tried, answer in sorted(answers.items()):
            if answer and (target := by_node.get(tried)) is not None:
                place = Address(target.address, target.port)
                lines.append(f"  from {labels[node]} to {target.label} at {place}: {answer}")
    return lines


class ReachAnswers:
    """`ReachAnswers` opens a port when the first host requests it, and tries the ports of the other hosts.

    Arguments:
        key: the job's key; without a key all agents are on one host, and nothing is tried.
        own: the address at which other hosts reach this host.
    """

    def __init__(self, channel: ControlChannel, key: Key | None, own: str) -> None:
        self._channel = channel
        self._key = key
        self._own = own
        self._responder: Responder | None = None

    def process(self, message: ControlMessage) -> None:
        """Process the first host's messages about the reachability test.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        if message.kind in ("start", "end", "tried"):
            self.close()
        if self._key is None:
            return
        secret = self._key.reach_secret()
        if message.kind == "answer":
            self._answer(secret, message.body["trial"])
        elif message.kind == "reach":
            targets = [
                ReachTarget(int(n), str(label), str(at), int(port)) for n, label, at, port in message.body["targets"]
            ]
            trial, first = message.body["trial"], self._channel.first
            try_all(
                targets,
                secret,
                lambda results: self._channel.put(first, "reached", trial=trial, results=list(results.items())),
            )

    def _answer(self, secret: bytes, trial: Any) -> None:
        """Open the port, and send its number to the first host."""
        port, problem = 0, ""
        try:
            self._responder = self._responder or Responder(self._own, secret)
            port = self._responder.port
        except OSError as error:
            problem = error.strerror or str(error)
        self._channel.put(self._channel.first, "answering", trial=trial, port=port, problem=problem)

    def close(self) -> None:
        """Close the port at which other hosts have tried to reach this one, if it is open."""
        if self._responder is not None:
            self._responder.close()
            self._responder = None
