"""Hand file descriptors to the other ranks of a host over a Unix socket that has no name.

Its file is gone as soon as it listens; the other ranks reach it through the leader's /proc/<pid>/fd, which the kernel
opens to the same user only. They begin with a token, 128 random bits that only the job's store knows, and the kernel
vouches for the user on either side (`SO_PEERCRED`). Where ranks do not see each other's processes (containers) there is
a socket in Linux's abstract namespace as well, which every user of the machine can connect to: a connection of another
user is closed before anything is read from it, and one that sends nothing does not hold up the others.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from phalanx.deadline import Deadline
from phalanx.descriptors import wait_readable
from phalanx.errors import DeadlineError, PhalanxError
from phalanx.ipc.peer import peer_of
from phalanx.symmetric_memory import private

_SLICE_S = 0.5
_HELLO_TIMEOUT_S = 5.0  # a connection has so long to send its token and rank
_MAX_PENDING = 256  # accepted and without a token yet; beyond that the oldest is closed
_AT_ONCE = 64  # accepted in a row: other users may connect as fast as they can; read from the others in between
_BACKLOG = 1024
_PAUSE_S = 0.01
_HELLO = struct.Struct("16sI")
_SECONDS = struct.Struct("@ll")

Notice = Callable[[set[int]], None]


def new_token() -> str:
    """Return 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class FdAddress:
    """It says where local rank 0 listens, with its token. Without a `path` it is in the abstract namespace."""

    token: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> FdAddress:
        """Read what `str` has written."""
        token, _, path = text.partition("@")
        return cls(token, path)

    def __str__(self) -> str:
        return f"{self.token}@{self.path}"

    @property
    def socket_address(self) -> str:
        """Return the address as `connect` and `bind` take it."""
        return self.path or f"\0phalanx-{self.token}"


class FdServer:
    """It is the side of local rank 0, and listens from construction on, so that no other rank connects too early.

    `at` is a path in `private.folder()`, for ranks that learn the address in no other way.

    Raises:
        OSError: there are no Unix sockets here.
    """

    def __init__(self, token: str, *, at: str = "") -> None:
        self.token = token
        self._fd = -1
        self._at = at
        self._open = contextlib.ExitStack()
        if at:
            listener, path = private.listen_at(at, _BACKLOG), at
        else:
            listener, self._fd = private.new_listener(_BACKLOG)
            self._open.callback(os.close, self._fd)
            path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._listeners = [self._open.enter_context(listener)]
        self.address = FdAddress(token, path)

    def __enter__(self) -> FdServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._at:
            with contextlib.suppress(OSError):
                os.unlink(self._at)
        self._open.close()

    def open_to_containers(self) -> None:
        """Open an address for ranks that do not see this process in their /proc.

        Raises:
            OSError: another process has the name.
        """
        if self._at or len(self._listeners) > 1:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._listeners.append(self._open.enter_context(listener))
        listener.bind(FdAddress(self.token).socket_address)
        listener.listen(_BACKLOG)

    def serve(
        self,
        ranks: Sequence[int],
        fds: Sequence[int],
        deadline: Deadline,
        notice: Notice,
        *,
        own: Mapping[int, int] | None = None,
    ) -> None:
        """Send `fds` to each of `ranks` as it connects, followed by its `own` descriptor, if there is one.

        Raises:
            DeadlineError: some rank did not come; `missing` says which.
        """
        own = own or {}
        missing = set(ranks)
        connections: dict[int, _Connection] = {}
        try:
            while missing:
                is_late = deadline.passed  # but read once more from who has connected
                sockets: list[socket.socket] = [*self._listeners, *(v.socket for v in connections.values())]
                ready = wait_readable(sockets, min(_SLICE_S, deadline.left_s))
                for listener in self._listeners:
                    if listener in ready:
                        self._admit(listener, connections)
                for fd, connection in list(connections.items()):
                    rank = connection.read_rank(self.token)
                    if rank in missing:
                        with contextlib.suppress(OSError):  # it gave up, or died, while it waited
                            socket.send_fds(connection.socket, [b"ok"], [*fds, *([own[rank]] if rank in own else [])])
                            missing.discard(rank)
                    if connection.is_done:
                        connections.pop(fd).socket.close()
                if missing and is_late:
                    late = tuple(sorted(missing))
                    raise DeadlineError(f"no answer from {', '.join(f'rank {r}' for r in late)}", missing=late)
                if not ready and not deadline.passed:
                    # A rank that has not connected by now may be unable to use the first address.
                    with contextlib.suppress(OSError):
                        self.open_to_containers()
                    notice(missing)
        finally:
            for connection in connections.values():
                connection.socket.close()

    @staticmethod
    def _admit(listener: socket.socket, connections: dict[int, _Connection]) -> None:
        """Accept connections of this user; close those of others."""
        for admitted in range(_AT_ONCE):
            try:
                peer = listener.accept()[0]
            except BlockingIOError:
                return
            except (
                OSError
            ):  # out of descriptors; the kernel allocates one before it looks whether there is a connection
                if not admitted and connections:
                    connections.pop(next(iter(connections))).socket.close()
                elif not admitted:
                    time.sleep(_PAUSE_S)
                return
            if peer_of(peer).uid != os.getuid():
                peer.close()
                continue
            peer.setblocking(False)
            connections[peer.fileno()] = _Connection(peer)
            if len(connections) > _MAX_PENDING:
                connections.pop(next(iter(connections))).socket.close()


class _Connection:
    """It is a connection of this user that has yet to send the token and its rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_done = False
        self._received = b""
        self._deadline = Deadline.after(_HELLO_TIMEOUT_S)

    def read_rank(self, token: str) -> int | None:
        """Return the rank, once it and the right token have arrived; `is_done` is set when nothing more will arrive."""
        try:
            data = self.socket.recv(_HELLO.size - len(self._received))
        except BlockingIOError:
            self.is_done = self._deadline.passed
            return None
        except OSError:
            data = b""
        self._received += data
        if data and len(self._received) < _HELLO.size:
            return None
        self.is_done = True
        if len(self._received) != _HELLO.size:
            return None
        token_bytes, rank = _HELLO.unpack(self._received)
        return int(rank) if secrets.compare_digest(token_bytes, bytes.fromhex(token)) else None


def receive_fds(
    address: FdAddress,
    rank: int,
    count: int,
    deadline: Deadline,
    *,
    wait_for_leader: bool = False,
    look_around: Callable[[], None] = lambda: None,
) -> list[int]:
    """Return the `count` file descriptors that local rank 0 at `address` serves. The caller owns them.

    With `wait_for_leader` it may not listen yet: try until it does. An address in the abstract namespace is always
    tried until it answers: local rank 0 opens it when it knows that some rank needs it. `look_around` is called between
    two attempts, and may raise: a process that has ended opens nothing any more.

    Raises:
        PhalanxError: local rank 0 is gone, or refused this process.
        DeadlineError: it did not answer in time.
    """
    try:
        with contextlib.closing(_connect(address, deadline, wait_for_leader or not address.path, look_around)) as s:
            s.settimeout(min(deadline.left_s, 3600.0) or 0.001)
            if peer_of(s).uid != os.getuid():
                raise PhalanxError(
                    "the socket of local rank 0 on this host belongs to another user; nothing was exchanged"
                )
            s.sendall(_HELLO.pack(bytes.fromhex(address.token), rank))
            fds, cut_short = _receive(s, count)
    except TimeoutError:
        raise DeadlineError("local rank 0 of this host did not hand over the shared memory in time") from None
    except OSError as error:
        raise PhalanxError(f"local rank 0 of this host cannot be reached: {error}") from None
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        if cut_short:  # by the kernel: no descriptor was free
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PhalanxError(
                f"this process may have {soft} open files, and {count} more are needed for the memory of this host "
                "(ulimit -n)"
            )
        raise PhalanxError(
            f"local rank 0 of this host closed the connection after {len(fds)} of {count} file descriptors: "
            "read its log"
        )
    return fds


_NOT_YET = (errno.ECONNREFUSED, errno.ENOENT)
_QUEUE_FULL = (errno.EAGAIN, errno.EINTR, errno.ENOTCONN)  # or a signal came


def _connect(address: FdAddress, deadline: Deadline, wait: bool, look_around: Callable[[], None]) -> socket.socket:
    """Return a connection. It waits inside `connect` where the listener's queue is full: retries would overtake other
    ranks.
    """
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            slice_s = min(max(deadline.left_s, 0.01), _SLICE_S)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(int(slice_s), int(slice_s % 1 * 1e6)))
            s.connect(address.socket_address)
            return s
        except OSError as error:
            s.close()
            # /proc may not be read of a process in another container, and for ordinary users of one that has ended.
            if address.path and error.errno in (errno.EACCES, errno.EPERM):
                address, wait = FdAddress(address.token), True
            elif error.errno not in _QUEUE_FULL and not (wait and error.errno in _NOT_YET):
                raise
            if deadline.passed:
                raise TimeoutError from None
            look_around()
            time.sleep(min(_PAUSE_S, deadline.left_s) if error.errno not in _QUEUE_FULL else 0.0)
        except BaseException:
            s.close()
            raise


def _receive(s: socket.socket, count: int) -> tuple[list[int], bool]:
    """Return the descriptors that came, and whether the kernel held some back."""
    numbers = array.array("i")
    _, ancillary, flags, _ = s.recvmsg(2, socket.CMSG_SPACE(count * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers), bool(flags & socket.MSG_CTRUNC)
