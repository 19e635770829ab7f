"""Find this host's addresses and their interfaces, and check whether an address is this host's own, or public."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnAddress:
    """An `OwnAddress` is an address of this host and its interface."""

    address: str
    interface: str

    @property
    def is_global(self) -> bool:
        """Return whether other hosts can use this address: whether it is neither loopback nor IPv6 link-local."""
        ip = ipaddress.ip_address(self.address.partition("%")[0])
        return not (ip.is_loopback or (ip.is_link_local and ip.version == 6))

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)), ("netmask", ctypes.c_void_p), ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)  # fmt: skip
_IFF_UP = 1


def own_addresses() -> list[OwnAddress]:
    """Return this host's addresses: routable addresses first, IPv4 before IPv6, link-local and loopback last."""
    found: list[OwnAddress] = []
    with contextlib.suppress(OSError):
        found = _list_addresses()
    default = _routed_address()
    return sorted(dict.fromkeys(found), key=lambda own: (_distance(own), own.address != default, ":" in own.address))


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return each interface's IPv4 addresses, then its IPv6 addresses, without scopes; empty except on Linux.

    Raises:
        OSError: the system does not list them, for example because no descriptor is free.
    """
    found: dict[str, tuple[str, ...]] = {}
    for own in sorted(_list_addresses(), key=lambda own: ":" in own.address):
        found[own.interface] = (*found.get(own.interface, ()), own.address.partition("%")[0])
    return found


def _list_addresses() -> list[OwnAddress]:
    """Return the addresses of all interfaces that are up, in the kernel's order; raise the system's error."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = []
    entry = first
    while entry:
        item = entry.contents
        if item.address and item.flags & _IFF_UP and (text := _read(item.address.contents)):
            name = item.name.decode(errors="replace")
            if ipaddress.ip_address(text).is_link_local and ":" in text:
                text = f"{text}%{name}"
            found.append(OwnAddress(text, name))
        entry = item.next
    libc.freeifaddrs(first)
    return found


def _read(address: _SockAddr) -> str:
    data = bytes(address.data)
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, data[6:22])
    return ""


def _distance(own: OwnAddress) -> int:
    ip = ipaddress.ip_address(own.address.partition("%")[0])
    return 2 if ip.is_loopback else 1 if ip.is_link_local else 0


def _routed_address() -> str:
    """Return this host's address on its default route, or "". Sends nothing."""
    # documentation addresses, which no host has (RFC 5737, RFC 3849)
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            return str(sock.getsockname()[0])
    return ""


def resolve(host: str) -> list[str]:
    """Return the addresses of `host`; an empty list if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def is_own(host: str) -> bool:
    """Return whether `host` is a name or address of this host, to which a socket can be bound."""
    if host in ("localhost", socket.gethostname()):
        return True
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4]
            sock.bind(place)
            return True
    return False


def is_public(address: str) -> bool:
    """Return whether an address is public: not a loopback, private or link-local address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:  # a name, or empty
        return False


def find_interface(address: str) -> str:
    """Return the interface of this host that has `address`; "" if there is none."""
    plain = address.partition("%")[0]
    return next((own.interface for own in own_addresses() if own.address.partition("%")[0] == plain), "")
