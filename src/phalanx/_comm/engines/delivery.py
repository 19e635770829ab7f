"""Wait until what this process has sent has reached the other hosts.

Gloo closes its connections at once and throws away what the kernel still holds for the peer. The peer may be behind a
slow link or may stand still, and needs it to finish what has been finished here.
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
_MOST_TRIED = 4096  # so many descriptors are tried, where they are not listed
_POLL_S, _LONGEST_POLL_S = 0.0002, 0.02


def open_sockets() -> dict[int, int]:
    """Return the sockets of this process: their inodes, by descriptor; it is empty where the system does not tell."""
    if sys.platform != "linux":
        return {}
    try:
        descriptors: Iterable[int] = map(int, os.listdir(_FOLDER))
    except OSError:  # there is no /proc
        descriptors = range(_MOST_TRIED)
    return {descriptor: inode for descriptor in descriptors if (inode := _inode(descriptor)) is not None}


def await_delivery(sockets: dict[int, int], deadline: Deadline) -> bool:
    """Wait until the peers' hosts have acknowledged all that was sent through these sockets; False: time was up."""

    def is_delivered() -> bool:
        still_open = (descriptor for descriptor, inode in sockets.items() if _inode(descriptor) == inode)
        return not any(map(_unacknowledged, still_open))

    return deadline.wait_until(is_delivered, _POLL_S, _LONGEST_POLL_S)


def _inode(descriptor: int) -> int | None:
    """Return the inode of the socket that has this descriptor; None if no socket has it."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed, maybe just now
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _unacknowledged(descriptor: int) -> int:
    """Return the bytes that the other end has not acknowledged; 0 if there is no other end (any more)."""
    answer = struct.pack("i", 0)
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, answer))
    except OSError:
        return 0
    return int(count)
