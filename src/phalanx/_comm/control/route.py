"""Find an address at which the coordinator can be reached, by trying all addresses to which its host name resolves."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx._base.deadline import Deadline
from phalanx._comm.control.address import Address

_EACH_S = 3.0
_STAGGER_S = 0.25  # before the next address is tried in parallel, as in Happy Eyeballs (RFC 8305)
_LINGER_S, _LEAST_S = 0.05, 0.001
_NO_HELLO = b"\x04\xc8\x05HELLO" + bytes(194)
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass(frozen=True)
class Route:
    """A `Route` is a numeric address that accepted a connection, and this host's own address on that connection."""

    address: Address
    own_host: str


@dataclass
class NoRouteError(Exception):
    """No address accepted a connection; the message lists the result of each attempt."""

    tried: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{place}: {answer}" for place, answer in self.tried.items())


def find_route(place: Address, deadline: Deadline) -> Route:
    """Return the first address of `place` that accepts a connection; attempts start one by one, and run in parallel.

    Raises:
        NoRouteError: the name does not resolve, or no address accepted a connection within a few seconds or `deadline`.
    """
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty label, or one of more than 63 letters
        why = error.strerror if isinstance(error, OSError) else error
        raise NoRouteError({place.host: f"the host name does not resolve ({why})"}) from None
    targets = list(dict.fromkeys((family, target) for family, _, _, _, target in found))
    problem = NoRouteError()
    limit = Deadline.after(min(deadline.left_s, _EACH_S + _STAGGER_S * len(targets)), deadline.clock)
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                if targets:
                    family, target = targets.pop(0)
                    _start(selector, family, target, problem)
                elif not selector.get_map() or limit.passed:
                    break
                for ready, _ in selector.select(min(limit.left_s, _STAGGER_S if targets else _EACH_S)):
                    attempt: socket.socket = ready.fileobj  # type: ignore[assignment]
                    selector.unregister(attempt)
                    with attempt:
                        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        if code == 0:
                            return Route(_numeric(ready.data), attempt.getsockname()[0])
                        problem.tried[str(_numeric(ready.data))] = _words(code)
        finally:
            for ready in list(selector.get_map().values()):
                problem.tried[str(_numeric(ready.data))] = "no answer (a firewall, or no host at this address)"
                ready.fileobj.close()  # type: ignore[union-attr]
    raise problem


def _start(selector: selectors.BaseSelector, family: int, target: tuple[object, ...], problem: NoRouteError) -> None:
    try:
        attempt = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # a kernel without IPv6
        problem.tried[str(_numeric(target))] = _words(error.errno or 0)
        return
    attempt.setblocking(False)
    code = attempt.connect_ex(target)
    if code in (0, errno.EINPROGRESS):
        selector.register(attempt, selectors.EVENT_WRITE, target)
    else:
        attempt.close()
        problem.tried[str(_numeric(target))] = _words(code)


def _numeric(target: tuple[object, ...]) -> Address:
    host, port = str(target[0]), int(str(target[1]))
    if len(target) == 4 and target[3] and "%" not in host:  # a link-local address means nothing without its interface
        host = f"{host}%{socket.if_indextoname(int(str(target[3])))}"
    return Address(host, port)


def _words(code: int) -> str:
    if code == errno.ECONNREFUSED:
        return "refused (nothing listens at this port there)"
    return os.strerror(code)


def is_refused(address: Address, timeout_s: float) -> bool:
    """Return whether the host at a numeric address replies that the port is closed."""
    try:
        socket.create_connection((address.host, address.port), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def who_answers(
    address: Address, timeout_s: float, hangs_up: Callable[[Deadline], bool] = lambda deadline: False
) -> tuple[str, bool]:
    """Return what listens at a numeric address, and whether a coordinator there refuses our handshake.

    The first result is 'coordinator', a description of something else, or '' if the answer is missing or incomplete.
    `hangs_up` attempts the handshake, and returns whether the coordinator closed the connection. A coordinator also
    closes connections when it is full or ending. So a silent connection is opened before: only if that older
    connection stays open was the handshake refused. This takes at most `timeout_s`, however slow the other end is.
    """
    deadline = Deadline.after(timeout_s)
    greeting, refuses = b"", False
    try:
        with socket.create_connection((address.host, address.port), max(deadline.left_s, _LEAST_S)) as probe:
            probe.sendall(_GREETING)
            while len(greeting) < 64:
                probe.settimeout(max(deadline.left_s, _LEAST_S))
                if not (part := probe.recv(64 - len(greeting))):
                    break
                greeting += part
                if deadline.passed:
                    return "", False
            if is_coordinator := _is_of_coordinator(greeting):
                refuses = hangs_up(deadline)
            time.sleep(_LINGER_S)
            refuses = refuses and _is_open(probe)
            probe.sendall(_NO_HELLO)  # an invalid handshake, so that the coordinator logs a refusal with our address
    except OSError:
        return "", False
    if is_coordinator:
        return "coordinator", refuses
    if greeting[:1] in (b"", b"\xff") and len(greeting) < 64:  # may be a coordinator that was full
        return "", False
    return f"something else ({greeting[:40]!r})", False


def _is_of_coordinator(greeting: bytes) -> bool:
    return len(greeting) == 64 and greeting[0] == 0xFF and greeting[12:32].rstrip(b"\0") == b"CURVE"


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other end, which should send nothing more, has not closed this connection."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
