"""A worker accepts connections from the other workers on its host at a `LocalListener`.

A worker that connects sends its `WorkerAddress` and one end of a second socket, which carries file descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.ipc import local_listener
from phalanx._base.ipc.local_listener import MOST_PENDING, LocalAddress, LocalListener, new_token
from phalanx.errors import PeerLostError, PhalanxError
from phalanx.rpc.worker_info import WorkerAddress

_HELLO = struct.Struct("<4s16sI")
_MAGIC = b"PRC1"
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05
_NEEDED = 6  # the descriptors needed to connect or to accept: sockets, the peer's pidfd, wakeups
_MOST_BYTES = 1 << 16

Welcome = Callable[[WorkerAddress, socket.socket, socket.socket], None]


class Listener:
    """A `Listener` calls `welcome(member, socket, descriptor socket)` for each worker that connects."""

    def __init__(self, welcome: Welcome, reader: Any) -> None:
        self._welcome = welcome
        self._reader = reader
        self._pending: dict[int, _Visitor] = {}
        self._paused: list[socket.socket] = []
        self._listener = LocalListener(new_token())

    @property
    def token(self) -> str:
        return self._listener.address.token

    @property
    def address(self) -> str:
        """Return the path and the token as one string, which workers publish in the store."""
        return str(self._listener.address)

    def start(self) -> None:
        self._reader.watch(self._listener.sockets[0].fileno(), self)

    def open_to_containers(self) -> None:
        """Also listen in the abstract socket namespace, for workers that do not see this process in their /proc."""
        if opened := self._listener.open_to_containers():
            self._reader.watch(opened.fileno(), self)

    def ready(self, events: int) -> None:
        """Accept the processes that have connected."""
        for listener in self._listener.sockets:
            try:
                self._accept(listener)
            except OSError as error:
                # the connection stays pending, and epoll would report it forever
                if error.errno in _NO_DESCRIPTOR:
                    self._reader.forget(listener.fileno())
                    self._paused.append(listener)
                    self._reader.wake_by(time.monotonic() + _PAUSE_S)

    def _accept(self, listener: socket.socket) -> None:
        _check_room(_NEEDED)
        for sock in self._listener.accept(listener):
            if len(self._pending) >= MOST_PENDING:
                self.dismiss(next(iter(self._pending.values())))
            visitor = self._pending[sock.fileno()] = _Visitor(sock, self)
            self._reader.watch(sock.fileno(), visitor)
            _check_room(_NEEDED)

    def resume(self) -> None:
        """Resume accepting after a pause, because a descriptor may be free again. The reader calls this."""
        while self._paused:
            self._reader.watch(self._paused.pop().fileno(), self)

    def dismiss(self, visitor: _Visitor, member: WorkerAddress | None = None, fd: int = -1) -> None:
        """Stop polling a visitor; welcome it as the worker `member`, or close it if `member` is None."""
        self._pending.pop(visitor.socket.fileno(), None)
        self._reader.forget(visitor.socket.fileno())
        if member is None:
            visitor.socket.close()
            return
        fd_socket = socket.socket(fileno=fd)
        self._welcome(member, visitor.socket, fd_socket)

    def abandon(self) -> None:
        """Close the inherited descriptors in a forked child."""
        for visitor in self._pending.values():
            visitor.socket.close()
        self._listener.close()

    def close(self) -> None:
        """Stop accepting workers."""
        for listener in self._listener.sockets:
            self._reader.forget(listener.fileno())
        for visitor in list(self._pending.values()):
            self.dismiss(visitor)
        self._paused.clear()
        self._listener.close()


class _Visitor:
    """A `_Visitor` is a process of this user that has connected but has not sent its hello yet."""

    def __init__(self, sock: socket.socket, listener: Listener) -> None:
        self.socket = sock
        self._listener = listener

    def ready(self, events: int) -> None:
        """Read the visitor's hello, which a worker sends with one `sendmsg`."""
        fds: list[int] = []
        member = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
            data, fds, _, _ = socket.recv_fds(self.socket, _HELLO.size, 1)
            magic, token, nbytes = _HELLO.unpack(data)
            if magic == _MAGIC and secrets.compare_digest(token.hex(), self._listener.token) and nbytes <= _MOST_BYTES:
                text = self.socket.recv(nbytes)  # the same `sendmsg` sent it
                member = WorkerAddress.from_json(text)
        if member is None or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self._listener.dismiss(self)
        else:
            self._listener.dismiss(self, member, fds[0])


def connect(to: WorkerAddress, me: WorkerAddress, deadline: Deadline) -> tuple[socket.socket, socket.socket]:
    """Connect to a worker of this host; return the socket for frames and the socket for descriptors.

    Raises:
        PeerLostError: the worker cannot be reached.
        PhalanxError: another user listens there, or this process has reached its limit of open files.
    """
    try:
        _check_room(_NEEDED)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _no_descriptor(to, error) from None
    with theirs:
        try:
            return _enter(to, me, deadline, theirs), ours
        except BaseException:
            ours.close()
            raise


def _check_room(number: int) -> None:
    """Raise OSError unless `number` descriptors are free: to the peer, a half-open connection looks like a loss."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))


def _no_descriptor(to: WorkerAddress, error: OSError) -> PhalanxError:
    return PhalanxError(
        f"cannot connect to {to}: {error.strerror} (`ulimit -n` shows the limit of this process). Nothing was sent."
    )


def _enter(to: WorkerAddress, me: WorkerAddress, deadline: Deadline, theirs: socket.socket) -> socket.socket:
    address = LocalAddress.parse(to.local)
    problem: OSError | None = None
    for place in (address, address.for_containers):
        try:
            sock = local_listener.connect(place, deadline, str(to))
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise _no_descriptor(to, error) from None
            problem = problem or error
            continue
        try:
            text = me.to_json().encode()
            hello = _HELLO.pack(_MAGIC, bytes.fromhex(address.token), len(text)) + text
            socket.send_fds(sock, [hello], [theirs.fileno()])
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise PeerLostError(f"{to} cannot be reached: {error.strerror}", ranks=(to.info.id,)) from None
            raise
        return sock
    raise PeerLostError(f"{to} cannot be reached: {str(problem) or 'it accepts no connection'}", ranks=(to.info.id,))
