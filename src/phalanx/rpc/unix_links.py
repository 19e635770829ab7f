"""A worker listens here for the others of its host, which come in by a token that only the job's store knows.

A worker that connects says who it is (`WorkerAddress`), and hands over its end of a second socket, for descriptors. The
kernel vouches for the user on either side (`SO_PEERCRED`): connections of another one are closed before anything is
read from it.
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

from phalanx.deadline import Deadline
from phalanx.errors import PeerLostError, PhalanxError
from phalanx.ipc.peer import peer_of
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.symmetric_memory import private

_BACKLOG = 1024
_HELLO = struct.Struct("<4s16sI")
_MAGIC = b"PRC1"
_MOST_PENDING = 256
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05
_NEEDED = 6  # the descriptors needed to connect or to accept: sockets, a watch of the process, wakeups
_MOST_BYTES = 1 << 16

Welcome = Callable[[WorkerAddress, socket.socket, socket.socket], None]


class Listener:
    """`Listener` is the listening side. `welcome(member, socket, descriptor socket)` is called for each worker that has
    come in.
    """

    def __init__(self, welcome: Welcome, serving: Any) -> None:
        self.token = secrets.token_bytes(16)
        self._welcome = welcome
        self._serving = serving
        self._pending: dict[int, _Visitor] = {}
        self._paused: list[socket.socket] = []
        self._open = contextlib.ExitStack()
        listener, fd = private.new_listener(_BACKLOG)
        self._open.enter_context(listener)
        self._open.callback(os.close, fd)
        self._listener = listener
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._abstract: socket.socket | None = None

    @property
    def address(self) -> str:
        """Return the path and the token, for the store."""
        return f"{self.token.hex()}@{self.path}"

    def start(self) -> None:
        """Start to accept workers."""
        self._serving.watch(self._listener.fileno(), self)

    def open_to_containers(self) -> None:
        """Listen in the abstract namespace as well, for workers that do not see this process in their /proc."""
        if self._abstract is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._abstract = self._open.enter_context(listener)
        listener.bind(abstract_name(self.token))
        listener.listen(_BACKLOG)
        self._serving.watch(listener.fileno(), self)

    def ready(self, events: int) -> None:
        """Accept the processes that have connected."""
        for listener in filter(None, (self._listener, self._abstract)):
            try:
                self._accept(listener)
            except BlockingIOError:
                continue
            except OSError as error:
                # a process that connects waits; the leader would be told of it without end
                if error.errno in _NO_DESCRIPTOR:
                    self._serving.forget(listener.fileno())
                    self._paused.append(listener)
                    self._serving.wake_clock(time.monotonic() + _PAUSE_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            _check_room(_NEEDED)
            sock, _ = listener.accept()
            if peer_of(sock).uid != os.getuid():
                sock.close()
                continue
            sock.setblocking(False)
            if len(self._pending) >= _MOST_PENDING:
                self.dismiss(next(iter(self._pending.values())))
            visitor = self._pending[sock.fileno()] = _Visitor(sock, self)
            self._serving.watch(sock.fileno(), visitor)

    def resume(self) -> None:
        """Continue after a pause, because another descriptor may be free. The clock calls this."""
        while self._paused:
            self._serving.watch(self._paused.pop().fileno(), self)

    def dismiss(self, visitor: _Visitor, member: WorkerAddress | None = None, fd: int = -1) -> None:
        """Forget a visitor that has said who it is, or that is not one of ours."""
        self._pending.pop(visitor.socket.fileno(), None)
        self._serving.forget(visitor.socket.fileno())
        if member is None:
            visitor.socket.close()
            return
        fd_socket = socket.socket(fileno=fd)
        self._welcome(member, visitor.socket, fd_socket)

    def abandon(self) -> None:
        """Close this process's descriptors in a fork."""
        for visitor in self._pending.values():
            visitor.socket.close()
        self._open.close()

    def close(self) -> None:
        """Stop accepting workers."""
        for listener in filter(None, (self._listener, self._abstract)):
            self._serving.forget(listener.fileno())
        for visitor in list(self._pending.values()):
            self.dismiss(visitor)
        self._paused.clear()
        self._open.close()


class _Visitor:
    """`_Visitor` is a process of this user that has yet to say who it is."""

    def __init__(self, sock: socket.socket, listener: Listener) -> None:
        self.socket = sock
        self._listener = listener

    def ready(self, events: int) -> None:
        """Read its hello, which comes in one piece from a worker of ours."""
        fds: list[int] = []
        member = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
            data, fds, _, _ = socket.recv_fds(self.socket, _HELLO.size, 1)
            magic, token, nbytes = _HELLO.unpack(data)
            if magic == _MAGIC and secrets.compare_digest(token, self._listener.token) and nbytes <= _MOST_BYTES:
                text = self.socket.recv(nbytes)  # sent in one piece
                member = WorkerAddress.from_json(text)
        if member is None or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self._listener.dismiss(self)
        else:
            self._listener.dismiss(self, member, fds[0])


def abstract_name(token: bytes) -> str:
    """Return the listener's name in the abstract namespace."""
    return f"\0phalanx-rpc-{token.hex()}"


def connect(to: WorkerAddress, me: WorkerAddress, deadline: Deadline) -> tuple[socket.socket, socket.socket]:
    """Return a connection to a worker of this host: for frames, and for descriptors.

    Raises:
        PeerLostError: the worker is gone.
        PhalanxError: another user listens there; or this process may not have more open files.
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
    """Raise OSError unless so many descriptors are free: a connection that fails half way looks lost to the other
    end.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))


def _no_descriptor(to: WorkerAddress, error: OSError) -> PhalanxError:
    return PhalanxError(
        f"{to} cannot be connected to: {error.strerror} (ulimit -n says how many this process may have). "
        "Nothing was sent."
    )


def _enter(to: WorkerAddress, me: WorkerAddress, deadline: Deadline, theirs: socket.socket) -> socket.socket:
    token, _, path = to.local.partition("@")
    secret = bytes.fromhex(token)
    problem: OSError | None = None
    for address in (path, abstract_name(secret)):
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise _no_descriptor(to, error) from None
        try:
            _connect(sock, address, deadline)
        except OSError as error:
            sock.close()
            problem = problem or error
            continue
        try:
            if peer_of(sock).uid != os.getuid():
                raise PhalanxError(f"the socket of {to} belongs to another user; nothing was sent")
            text = me.to_json().encode()
            hello = _HELLO.pack(_MAGIC, secret, len(text)) + text
            socket.send_fds(sock, [hello], [theirs.fileno()])
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise PeerLostError(f"{to} cannot be reached: {error.strerror}", ranks=(to.info.id,)) from None
            raise
        return sock
    raise PeerLostError(f"{to} cannot be reached: {problem}", ranks=(to.info.id,))


def _connect(sock: socket.socket, address: str, deadline: Deadline) -> None:
    sock.settimeout(min(max(deadline.left_s, 0.01), 30.0))
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:  # its queue is full
            if deadline.passed:
                raise
            time.sleep(0.005)
