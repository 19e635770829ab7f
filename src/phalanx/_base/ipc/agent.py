"""The processes of a host reach the agent of `phalanx run` by a socket with a name and without a file.

The address `name:token` is what a rank has in PHALANX_AGENT. The name can be read by everybody (in /proc/net/unix), the
token only by processes of the job. The socket is in Linux's abstract namespace, so that no file is left behind; other
systems have none.
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
    """Return a socket that listens at `name`, and does not block.

    Raises:
        OSError: there are no Unix sockets here, or the name is taken.
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
    """Return a connection to the process that listens at `name`; `timeout_s` is how long to wait if many others do.

    Raises:
        OSError: no process listens there, or time is up.
    """
    sock = _new_socket()
    try:
        sock.setblocking(timeout_s > 0)
        connect_within(sock, f"\0{name}", timeout_s)
        return Channel(sock, max_fds=max_fds)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(error.errno, f"{name} takes no connection") from None
    except BaseException:
        sock.close()
        raise


def connect_within(sock: socket.socket, address: str, timeout_s: float) -> None:
    """Connect `sock`, and wait for `timeout_s` where the listener's queue is full.

    Python's own timeout ends at once there.
    """
    timeout_s = max(timeout_s, 0.001)  # zero would mean for ever
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))
    sock.connect(address)
    sock.getpeername()  # OSError: `connect` also returns where a signal has come, and there is no connection
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(0, 0))  # what is sent later waits for ever


def split(agent: str) -> tuple[str, str]:
    """Return name and token of the address `agent`."""
    name, _, token = agent.rpartition(":")
    return name, token


def tell(agent: str, kind: str, *, fds: Sequence[int] = (), **fields: Any) -> bool:
    """Send one message to the agent with address `agent`, with the job's token; return whether one takes it.

    It costs a connection, about 20 µs, and never waits. It returns False if there is no agent any more, or it is in
    another network namespace, or has more connections than it can accept.
    """
    name, token = split(agent)
    with contextlib.suppress(OSError), contextlib.closing(connect(name)) as channel:
        channel.put({"kind": kind, "token": token, **fields}, fds)
        return not (channel.waiting or channel.broken)
    return False


def ask(agent: str, kind: str, timeout_s: float) -> tuple[int, ...]:
    """Send one message to the agent with address `agent` and return the descriptors of its answer; the caller owns
    them. There are none if it does not answer.
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
