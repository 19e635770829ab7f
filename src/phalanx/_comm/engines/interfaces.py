"""List this host's network interfaces and addresses, and check whether an address is public."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_INET6 = Path("/proc/net/if_inet6")


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return each interface's IPv4 address, if any, then its IPv6 addresses; empty except on Linux."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for name, addresses in found.items():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # the host has no IPv6
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return {name: tuple(addresses) for name, addresses in found.items() if addresses}


def is_public(address: str) -> bool:
    """Return whether an address is public: not a loopback, private or link-local address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:  # a name, or empty
        return False
