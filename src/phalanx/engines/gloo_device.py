"""Gloo connects the ranks of this process with those of others at one port, which all groups share.

    a group's ranks connect          ──> the kernel takes connections from their hosts' addresses
    ... though all have said where they listen, for longer than that takes
                                     ──> and from all: a host's address may be translated on the way
    no group is connecting           ──> the kernel drops whatever comes to the port

Gloo accepts whoever connects, for as long as the process lives, and a process without descriptors left is aborted. It
offers no call that stops it, so the kernel is asked to drop what comes (SO_ATTACH_FILTER of Linux). Connections that
are there stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed import ProcessGroupGloo

from phalanx.engines.delivery import open_sockets
from phalanx.packet_filter import attach, take_only

_ProcessGroupGloo: Any = ProcessGroupGloo  # torch's stub knows only some of what the class has
# They are well above what ranks need that reach each other by their own addresses, one after another: 64 ranks
# on two busy cores take 0.9 s.
_KNOWN_ONLY_S, _EACH_KNOWN_ONLY_S, _MOST_KNOWN_ONLY_S = 2.0, 0.1, 30.0


class GlooDevice:
    """It is a port of this process on one network, and the thread that serves its connections. See `gloo_device`."""

    def __init__(self, address: str, interface: str) -> None:
        before = open_sockets()
        self.device = _create(address, interface)
        new = {
            descriptor: inode
            for descriptor, inode in open_sockets().items()
            if before.get(descriptor) != inode and _place(descriptor, inode) is not None
        }
        # If there are two, it is not known which one another thread has opened meanwhile: that must stay as it is.
        self._listening = new if len(new) == 1 else {}
        self._lock = threading.Lock()
        # the addresses that each connecting group expects; none means any
        self._connecting: dict[object, frozenset[str]] = {}
        self._filter_all()

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Return the addresses and ports at which it listens, as far as the system tells."""
        places = (_place(descriptor, inode) for descriptor, inode in self._listening.items())
        return [place for place in places if place is not None]

    @contextlib.contextmanager
    def connecting(self, addresses: Iterable[str] = (), num_peers: int = 1) -> Iterator[Callable[[], None]]:
        """Take connections inside, from `addresses` (empty: from all).

        Call what is yielded, once, when all ranks have said where they listen. From then on they have two seconds, and
        0.1 s for each of `num_peers`, 30 s at most; after that connections from all addresses are taken.
        """
        group = object()
        self._expect(group, frozenset(addresses))
        known_only_s = min(_KNOWN_ONLY_S + num_peers * _EACH_KNOWN_ONLY_S, _MOST_KNOWN_ONLY_S)
        opening = threading.Timer(known_only_s, self._expect_anybody, (group,))
        opening.daemon = True
        try:
            yield opening.start
        finally:
            opening.cancel()
            self._expect(group, None)

    def _expect(self, group: object, addresses: frozenset[str] | None) -> None:
        """Let the kernel drop what comes from addresses that no group expects; `group` expects nobody with None."""
        with self._lock:
            if addresses is None:
                del self._connecting[group]
            else:
                self._connecting[group] = addresses
            self._filter_all()

    def _expect_anybody(self, group: object) -> None:
        with self._lock:
            if group in self._connecting:
                self._connecting[group] = frozenset()
                self._filter_all()

    def _filter_all(self) -> None:
        expected = self._connecting.values()
        self._filter(None if not all(expected) else take_only(frozenset().union(*expected)))

    def _filter(self, program: bytes | None) -> None:
        """Let the kernel ask `program` whether to take what comes; None takes all."""
        for descriptor, inode in self._listening.items():
            with contextlib.suppress(OSError), _socket_of(descriptor, inode) as listening:
                attach(listening, program)


# By process (a fork has none of its parent's threads) and place.
_known_devices: weakref.WeakValueDictionary[tuple[int, str, str], GlooDevice] = weakref.WeakValueDictionary()
_devices_lock = threading.Lock()


def gloo_device(address: str, interface: str) -> GlooDevice:
    """Return this process's device on `interface`, or on that of `address`; it closes when nothing holds it any more.

    Raises:
        RuntimeError: there is no such address or interface on this host.
    """
    key = (os.getpid(), address, interface)
    with _devices_lock:
        device = _known_devices.get(key)
        if device is None:
            device = _known_devices[key] = GlooDevice(address, interface)
        return device


def _create(address: str, interface: str) -> Any:
    if not address and not interface:
        # The job's store is a file: Gloo asks for this host's own name, or takes loopback.
        return _ProcessGroupGloo.create_default_device(lazy_init=False)
    named = {"interface": interface} if interface else {"hostname": address}
    return _ProcessGroupGloo.create_device(**named, lazy_init=False)


@contextlib.contextmanager
def _socket_of(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """Yield the socket that has this descriptor, which stays Gloo's to close.

    Raises:
        OSError: the descriptor is closed, or belongs to something else by now.
    """
    if os.fstat(descriptor).st_ino != inode:
        raise OSError("the descriptor is another file's by now")
    same = socket.socket(fileno=descriptor)
    try:
        yield same
    finally:
        same.detach()


def _place(descriptor: int, inode: int) -> tuple[str, int] | None:
    """Return where this socket listens; None if it does not, is not for TCP, or listens on all addresses of the
    host.
    """
    try:
        with _socket_of(descriptor, inode) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port = one.getsockname()[:2]
            return None if host in ("0.0.0.0", "::") else (str(host), int(port))  # Gloo binds to one address
    except OSError:
        return None
