"""The `Address` of a coordinator: `host:port`, `[v6]:port`, or the path of a Unix socket on this host."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Address:
    """An `Address` is a host and a port, or a Unix socket if `path` is set; a Unix socket needs no key."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address, with or without the prefix `tcp://` or `ipc://`.

        Raises:
            ValueError: `text` is not an address.
        """
        text = text.strip()
        text = text.removeprefix("tcp://").removeprefix("ipc://")
        if text.startswith("/"):
            return cls(path=text)
        host, colon, port = text.rpartition(":")
        has_port = colon and not text.endswith("]") and (":" not in host or host.startswith("["))
        if not has_port or not port.isdecimal() or int(port) > 0xFFFF:
            raise ValueError(f"an address is HOST:PORT (or [IPv6]:PORT), got {text!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """Return the address as a ZeroMQ endpoint."""
        return f"ipc://{self.path}" if self.path else f"tcp://{self}"


def listen(address: Address, backlog: int) -> socket.socket:
    """Return a listening socket at `address`; an empty host, or `*`, means every interface, IPv4 and IPv6.

    Raises:
        OSError: the address belongs to another host, the port is in use, or the name does not resolve.
    """
    if address.host in ("", "*"):
        candidates: list[tuple[int, tuple[Any, ...]]] = [
            (socket.AF_INET6, ("::", address.port)),
            (socket.AF_INET, ("0.0.0.0", address.port)),
        ]
    else:
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except UnicodeError as error:
            raise OSError(f"{address.host!r} is not a host name ({error})") from None
        candidates = [(family, place) for family, _, _, _, place in found]
    problem: OSError | None = None
    for family, place in candidates:
        try:
            return _listen(family, place, backlog, both=address.host in ("", "*", "::"))
        except OSError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _listen(family: int, place: tuple[object, ...], backlog: int, *, both: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | getattr(socket, "SOCK_CLOEXEC", 0))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        # for its first five seconds, a connection that has sent nothing stays in the kernel
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
