"""Listen as the agent of `phalanx run`, or connect to it, at a socket that has a name but no file.

A rank has the address `name:token` in PHALANX_AGENT. Every user can read the name (in /proc/net/unix), but only the
job's processes know the token. The socket is in Linux's abstract namespace, so that no file is left behind. Other
systems have no agent socket.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.channel import Channel

_SECONDS = struct.Struct("@ll")


def listen(name: str, backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens at `name`.

    Raises:
        OSError: this system has no Unix sockets, or the name is taken.
    """
    listener = _new_socket()
    try:
        listener.setblocking(False)
        listener.bind(f"\0{name}")
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(name: str, timeout_s: float = 0.0, *, max_fds: int = 1) -> Channel:
    """Return a connection to the process that listens at `name`; wait up to `timeout_s` if its queue is full.

    Raises:
        OSError: no process listens at `name`, or the time is up.
    """
    sock = _new_socket()
    try:
        sock.setblocking(timeout_s > 0)
        connect_within(sock, f"\0{name}", timeout_s)
        return Channel(sock, max_fds=max_fds)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(error.errno, f"{name} accepts no connection") from None
    except BaseException:
        sock.close()
        raise


def connect_within(sock: socket.socket, address: str, timeout_s: float) -> None:
    """Connect `sock`, waiting up to `timeout_s` while the listener's queue is full.

    With Python's own socket timeout, `connect` would fail at once in that case.
    """
    timeout_s = max(timeout_s, 0.001)  # zero would mean no timeout
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))
    sock.connect(address)
    sock.getpeername()  # raises OSError if a signal ended `connect` without a connection
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(0, 0))  # later sends have no timeout


def split(agent: str) -> tuple[str, str]:
    """Split the address `agent` into name and token."""
    name, _, token = agent.rpartition(":")
    return name, token


def notify(agent: str, kind: str, *, fds: Sequence[int] = (), **fields: Any) -> bool:
    """Send one message, with the job's token, to the agent at `agent`; return whether it was sent.

    This costs a connection, about 20 µs, and never waits. It returns False if the agent has ended, is in another
    network namespace, or has more connections than it can accept.
    """
    name, token = split(agent)
    with contextlib.suppress(OSError), contextlib.closing(connect(name)) as channel:
        channel.put({"kind": kind, "token": token, **fields}, fds)
        return not (channel.waiting or channel.broken)
    return False


def request(agent: str, kind: str, timeout_s: float) -> tuple[int, ...]:
    """Send one message to the agent at `agent`, and return the descriptors in its answer, which the caller owns.

    The result is empty if the agent does not answer.
    """
    name, token = split(agent)
    deadline = Deadline.after(timeout_s)
    with contextlib.suppress(OSError), contextlib.closing(connect(name, timeout_s)) as channel:
        channel.put({"kind": kind, "token": token})
        answer = channel.receive(deadline)
        return () if answer is None else answer.fds
    return ()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | getattr(socket, "SOCK_CLOEXEC", 0))
