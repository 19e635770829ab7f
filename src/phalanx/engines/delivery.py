"""Whether what this process has sent has reached the other hosts.

Gloo closes its connections at once and throws away what the kernel still holds for the peer, who may be behind a slow
link or may stand still, and needs it to finish what has been finished here.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
import time

from phalanx.deadline import Deadline

_FOLDER = "/proc/self/fd"
_POLL_S, _LONGEST_POLL_S = 0.0002, 0.02


def open_sockets() -> dict[int, str]:
    """The sockets of this process: 'socket:[inode]', by descriptor. Empty where the system does not tell."""
    if sys.platform != "linux":
        return {}
    found = {}
    for name in os.listdir(_FOLDER):
        text = _target(int(name))
        if text.startswith("socket:"):
            found[int(name)] = text
    return found


def await_delivery(sockets: dict[int, str], deadline: Deadline) -> bool:
    """Wait until the peers' hosts have acknowledged all that was sent through these sockets; False if time was up."""
    pause_s = _POLL_S
    while any(_unacknowledged(descriptor) for descriptor, text in sockets.items() if _target(descriptor) == text):
        if deadline.passed:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_POLL_S)
    return True


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"{_FOLDER}/{descriptor}")
    except OSError:  # closed, maybe just now
        return ""


def _unacknowledged(descriptor: int) -> int:
    """The bytes that the other end has not acknowledged; 0 where there is no other end (any more)."""
    answer = struct.pack("i", 0)
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, answer))
    except OSError:
        return 0
    return int(count)
