"""Track connections that have not yet sent a member's message, and choose which is closed first. It is purely data."""

from __future__ import annotations

import functools
import ipaddress
from collections import OrderedDict

HONEST = 8  # connections that a host of a job may open at once
_SITE_BITS = 64  # the part of an address of IPv6 that whoever has a network there cannot choose

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class YoungConnections:
    """`YoungConnections` keeps connections in the order in which they came, each with its network.

    Cost: each method but `of` and `older_than` takes the same time, however many connections and networks there are.
    """

    def __init__(self) -> None:
        self._networks: OrderedDict[int, str] = OrderedDict()  # by descriptor: its network
        self._since: dict[int, float] = {}  # by descriptor: when it came
        self._crowds: dict[str, OrderedDict[int, None]] = {}  # by network: its descriptors
        # by number of descriptors: the networks that have so many
        self._by_size: dict[int, OrderedDict[str, None]] = {}
        self._most = 0  # the most descriptors that any network has

    def __len__(self) -> int:
        return len(self._networks)

    def __contains__(self, fd: int) -> bool:
        return fd in self._networks

    def add(self, fd: int, network: str, now: float) -> None:
        """Note a connection that has just come, and was not there before."""
        self._networks[fd] = network
        self._since[fd] = now
        crowd = self._crowds.setdefault(network, OrderedDict())
        crowd[fd] = None
        self._move(network, len(crowd) - 1, len(crowd))

    def discard(self, fd: int) -> None:
        """Forget a connection, if it was noted."""
        network = self._networks.pop(fd, None)
        if network is None:
            return
        del self._since[fd]
        crowd = self._crowds[network]
        del crowd[fd]
        self._move(network, len(crowd) + 1, len(crowd))
        if not crowd:
            del self._crowds[network]

    @property
    def most(self) -> int:
        """Return how many connections the network with the most of them has."""
        return self._most

    def choose(self) -> int:
        """Return the one to close first: the oldest of the network that has the most; where no network has more than
        an honest host opens, the oldest of all.

        A stranger who connects from many addresses, few times from each, would otherwise have honest hosts closed,
        which open two.
        """
        if self._most <= HONEST:
            return next(iter(self._networks))
        return next(iter(self._crowds[next(iter(self._by_size[self._most]))]))

    def of(self, network: str) -> list[int]:
        """Return the connections that came from this network."""
        return list(self._crowds.get(network, ()))

    def older_than(self, age_s: float, now: float) -> list[int]:
        """Return the connections that came before this time."""
        found = []
        for fd in self._networks:
            if now - self._since[fd] <= age_s:
                break
            found.append(fd)
        return found

    def _move(self, network: str, before: int, after: int) -> None:
        if before:
            same = self._by_size[before]
            del same[network]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[network] = None
        if after > self._most or self._most not in self._by_size:
            self._most = after


@functools.lru_cache(maxsize=1024)
def classify(host: str, own: str) -> tuple[str, bool]:
    """Return the network whose connections are counted together, and whether the address is one of this host.

    A network is an address, or what one site has of IPv6. Hosts of one cluster often have addresses of one such
    network, so that in our own each address counts for itself.
    """
    address, mine = (_plain(ipaddress.ip_address(text.partition("%")[0])) for text in (host, own))
    is_own = address == mine or address.is_loopback
    if isinstance(address, ipaddress.IPv6Address):
        site = ipaddress.ip_network((address, _SITE_BITS), strict=False)
        if mine not in site:
            return str(site), is_own
    return str(address), is_own


def _plain(address: _Address) -> _Address:
    """Return an IPv4 address in its own form if it is written as one of IPv6; others as they are."""
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address
