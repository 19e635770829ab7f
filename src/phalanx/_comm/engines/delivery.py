"""Wait until all data sent by this process have reached the other hosts.

Gloo closes its connections at once and discards data that the kernel still holds for the peer. The peer may be behind a
slow link or may be stopped, and needs the data to complete an operation that is complete here.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
from collections.abc import Iterable

from phalanx._base.deadline import Deadline

_FOLDER = "/proc/self/fd"
_MOST_TRIED = 4096  # the most descriptors tried, if they cannot be listed
_POLL_S, _LONGEST_POLL_S = 0.0002, 0.02


def open_sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor; empty if the system does not list them."""
    if sys.platform != "linux":
        return {}
    try:
        descriptors: Iterable[int] = map(int, os.listdir(_FOLDER))
    except OSError:  # no /proc
        descriptors = range(_MOST_TRIED)
    return {descriptor: inode for descriptor in descriptors if (inode := _inode(descriptor)) is not None}


def await_delivery(sockets: dict[int, int], deadline: Deadline) -> bool:
    """Wait until the peers' hosts have acknowledged all data sent through these sockets; False after the deadline."""

    def is_delivered() -> bool:
        still_open = (descriptor for descriptor, inode in sockets.items() if _inode(descriptor) == inode)
        return not any(map(_unacknowledged, still_open))

    return deadline.wait_until(is_delivered, _POLL_S, _LONGEST_POLL_S)


def _inode(descriptor: int) -> int | None:
    """Return the inode of the socket with this descriptor; None if it is not a socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed, perhaps just now
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _unacknowledged(descriptor: int) -> int:
    """Return the bytes that the other end has not acknowledged; 0 without a connection."""
    answer = struct.pack("i", 0)
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, answer))
    except OSError:
        return 0
    return int(count)
