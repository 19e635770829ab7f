"""Listen on an unnamed Unix socket for the other processes of the job on this host.

The socket's file is removed as soon as the process listens; the others connect through /proc/<pid>/fd of the listening
process, which the kernel opens only for the same user. They first send a token, 128 random bits that only the job's
store has, and the kernel identifies the user on either side (`SO_PEERCRED`). For processes that do not see each other
(containers) there is also a socket in Linux's abstract namespace, to which every user of the machine can connect: a
connection of another user is closed before anything is read from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx._base.deadline import Deadline
from phalanx._base.ipc import private
from phalanx._base.ipc.agent import connect_within
from phalanx._base.ipc.channel import peer_of
from phalanx.errors import PhalanxError

MOST_PENDING = 256  # accepted connections without a token; beyond that the oldest is closed
_AT_ONCE = 64  # accepted in a row: other users may connect very fast, so read from the others in between
_BACKLOG = 1024
_SLICE_S = 0.5
_PAUSE_S = 0.01
_NOT_YET = (errno.ECONNREFUSED, errno.ENOENT)
_QUEUE_FULL = (errno.EAGAIN, errno.EINTR, errno.ENOTCONN)  # or interrupted by a signal


def new_token() -> str:
    """Return 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class LocalAddress:
    """A `LocalAddress` is where a process listens, with its token. Without a `path` it is in the abstract namespace."""

    token: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> LocalAddress:
        token, _, path = text.partition("@")
        return cls(token, path)

    def __str__(self) -> str:
        return f"{self.token}@{self.path}"

    @property
    def socket_address(self) -> str:
        """Return the address for `connect` and `bind`."""
        return self.path or f"\0phalanx-{self.token}"

    @property
    def for_containers(self) -> LocalAddress:
        """Return the address for processes that do not see the listening process in their /proc."""
        return LocalAddress(self.token)


class LocalListener:
    """A `LocalListener` listens from construction on, so that no process of the job connects too early.

    `at` is a path in `private.folder()`, for processes that cannot learn the address otherwise.

    Raises:
        OSError: this system has no Unix sockets.
    """

    def __init__(self, token: str, *, at: str = "") -> None:
        self._fd = -1
        self._at = at
        self._open = contextlib.ExitStack()
        if at:
            listener, path = private.listen_at(at, _BACKLOG), at
        else:
            listener, self._fd = private.new_listener(_BACKLOG)
            self._open.callback(os.close, self._fd)
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.sockets = [self._open.enter_context(listener)]
        self.address = LocalAddress(token, path)

    def remove(self) -> None:
        """Close the sockets, and remove their file, if any."""
        if self._at:
            with contextlib.suppress(OSError):
                os.unlink(self._at)
        self.close()

    def close(self) -> None:
        """Close the sockets in this process only; a forked child may call this, too."""
        self._open.close()

    def open_to_containers(self) -> socket.socket | None:
        """Open an address for processes that do not see this process in their /proc. Return its socket if it is new.

        Raises:
            OSError: another process uses the name.
        """
        if self._at or len(self.sockets) > 1:
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.sockets.append(self._open.enter_context(listener))
        listener.bind(self.address.for_containers.socket_address)
        listener.listen(_BACKLOG)
        return listener

    @staticmethod
    def accept(listener: socket.socket) -> Iterator[socket.socket]:
        """Yield the pending connections of this user, non-blocking; close other users' connections.

        Raises:
            OSError: this process has no free descriptors. The kernel allocates one before it checks for a connection.
        """
        for _ in range(_AT_ONCE):
            try:
                connection = listener.accept()[0]
            except BlockingIOError:
                return
            if peer_of(connection).uid != os.getuid():
                connection.close()
                continue
            connection.setblocking(False)
            yield connection


def connect(
    address: LocalAddress,
    deadline: Deadline,
    whose: str,
    *,
    retry: bool = False,
    check: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Return a connection to the process that listens at `address`; errors call it `whose`.

    If the listener's queue is full, this waits inside the system's `connect`, because retries could overtake processes
    that wait there. With `retry`, also wait for a process that does not listen yet. `check` is called between attempts,
    and may raise.

    Raises:
        OSError: no process listens at `address`.
        TimeoutError: the deadline has passed.
        PhalanxError: another user listens at `address`.
    """
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connect_within(sock, address.socket_address, min(deadline.left_s, _SLICE_S))
            if peer_of(sock).uid != os.getuid():
                raise PhalanxError(f"the socket of {whose} belongs to another user; nothing was exchanged")
            return sock
        except OSError as error:
            sock.close()
            is_full = error.errno in _QUEUE_FULL
            if not is_full and not (retry and error.errno in _NOT_YET):
                raise
            if deadline.passed:
                raise TimeoutError from None
            check()
            time.sleep(0.0 if is_full else min(_PAUSE_S, deadline.left_s))
        except BaseException:
            sock.close()
            raise
