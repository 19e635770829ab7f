"""Find the addresses of this host, and which address of another host accepts connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from phalanx._base import host_addresses
from phalanx._base.deadline import Deadline

_TRY_S = 2.0
_PAUSE_S = 0.1


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, never none: those that lead far come first, the loopback's last."""
    found = [own.address for own in host_addresses.own_addresses() if ":" not in own.address]
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    found.append("127.0.0.1")
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reachable(addresses: Sequence[str], port: int, deadline: Deadline) -> str:
    """Return the first of `addresses` where `port` takes a connection, tried in turn until time is up; else ""."""
    while True:
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_TRY_S):
                return address
            if deadline.passed:
                return ""
        time.sleep(_PAUSE_S)
