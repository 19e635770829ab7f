"""Gloo connects the ranks of this process with those of others at one port, which all groups share.

    a group's ranks connect     ──> the kernel takes connections
    no group is connecting      ──> the kernel drops whatever comes to the port

Gloo accepts whoever connects, for as long as the process lives, and a process without descriptors left is aborted. It
offers no call that stops it, so the kernel is asked to drop what comes (SO_ATTACH_FILTER of Linux). Connections that
are there stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch.distributed import ProcessGroupGloo

from phalanx._comm.engines.delivery import open_sockets

_ProcessGroupGloo: Any = ProcessGroupGloo  # torch's stub knows only some of what the class has
# <asm-generic/socket.h> and <linux/filter.h>; Python's socket module does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction, BPF_RET|BPF_K: no byte of a packet is taken


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
        self._num_connecting = 0
        self._filter()

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Return the addresses and ports at which it listens, as far as the system tells."""
        places = (_place(descriptor, inode) for descriptor, inode in self._listening.items())
        return [place for place in places if place is not None]

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Take connections inside."""
        with self._lock:
            self._num_connecting += 1
            self._filter()
        try:
            yield
        finally:
            with self._lock:
                self._num_connecting -= 1
                self._filter()

    def _filter(self) -> None:
        """Let the kernel take what comes to the port, or drop it, as it is wanted now."""
        if sys.platform != "linux":
            return
        for descriptor, inode in self._listening.items():
            with contextlib.suppress(OSError), _socket_of(descriptor, inode) as listening:  # none was set; a sandbox
                if self._num_connecting:
                    listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                else:
                    drop = ctypes.create_string_buffer(_DROP, len(_DROP))
                    program = struct.pack("HL", 1, ctypes.addressof(drop))
                    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


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
    """Return where this socket listens; None if it does not, is not for TCP, or listens on all addresses."""
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
