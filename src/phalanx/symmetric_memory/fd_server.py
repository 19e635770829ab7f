"""Hand file descriptors to the other ranks of a host over a Unix socket that has no name.

Its file is gone as soon as it listens; the other ranks reach it through the leader's /proc/<pid>/fd, which the kernel
opens to the same user only. What they say first are 128 random bits that only the job's store knows, and the kernel
vouches for the user on either side (`SO_PEERCRED`). Where ranks do not see each other's processes (containers) there is
one in Linux's abstract namespace as well, to which every user of the machine may come: whoever is not us is turned
away unheard, and nobody who dawdles holds up those behind.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError, PhalanxError
from phalanx.symmetric_memory import private
from phalanx.symmetric_memory.peer import peer_of

_SLICE_S = 0.5
_PATIENCE_S = 5.0  # with a visitor that says nothing
_MOST_VISITORS = 256  # who has said nothing while so many others came is shown out
_AT_ONCE = 64  # strangers come as fast as they can: hear the others in between
_BACKLOG = 1024
_PAUSE_S = 0.01
_HELLO = struct.Struct("16sI")
_SECONDS = struct.Struct("@ll")

Notice = Callable[[set[int]], None]


def new_token() -> str:
    """128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class FdAddress:
    """Where a leader is found, and what to say there. Without a `path` it is in the abstract namespace."""

    token: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> FdAddress:
        """The opposite of `str`."""
        token, _, path = text.partition("@")
        return cls(token, path)

    def __str__(self) -> str:
        return f"{self.token}@{self.path}"

    @property
    def socket_address(self) -> str:
        """For `connect` and `bind`."""
        return self.path or f"\0phalanx-{self.token}"


class FdServer:
    """The leader's side: a listening socket from construction, so that nobody can come too early.

    `at`: a path in `private.folder()`, for those who can be told no other way where to come.

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
        """Open an address to ranks that do not see this process in their /proc.

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
        """Give `fds` to each of `ranks`, in whatever order they come, and after them what is its `own`, if anything.

        Raises:
            DeadlineError: some rank did not come; `missing` says which.
        """
        own = own or {}
        missing = set(ranks)
        visitors: dict[int, _Visitor] = {}
        try:
            while missing:
                is_late = deadline.passed  # and whoever stands there now is heard for a last time
                sockets: list[socket.socket] = [*self._listeners, *(v.socket for v in visitors.values())]
                ready = _wait(sockets, min(_SLICE_S, deadline.left_s))
                for listener in self._listeners:
                    if listener in ready:
                        self._admit(listener, visitors)
                for fd, visitor in list(visitors.items()):
                    rank = visitor.hear(self.token)
                    if rank in missing:
                        with contextlib.suppress(OSError):  # it gave up, or died, while it stood in line
                            socket.send_fds(visitor.socket, [b"ok"], [*fds, *([own[rank]] if rank in own else [])])
                            missing.discard(rank)
                    if visitor.is_done:
                        visitors.pop(fd).socket.close()
                if missing and is_late:
                    raise DeadlineError(
                        f"ranks {sorted(missing)} did not fetch the memory", missing=tuple(sorted(missing))
                    )
                if not ready and not deadline.passed:
                    # Whoever has not come by now may find no way here; nobody has lost anything if it does.
                    with contextlib.suppress(OSError):
                        self.open_to_containers()
                    notice(missing)
        finally:
            for visitor in visitors.values():
                visitor.socket.close()

    @staticmethod
    def _admit(listener: socket.socket, visitors: dict[int, _Visitor]) -> None:
        """Let in who is our user."""
        for admitted in range(_AT_ONCE):
            try:
                peer = listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # no number is left for it; asked for before the kernel looks whether anybody is there
                if not admitted and visitors:
                    visitors.pop(next(iter(visitors))).socket.close()
                elif not admitted:
                    time.sleep(_PAUSE_S)
                return
            if peer_of(peer).uid != os.getuid():
                peer.close()
                continue
            peer.setblocking(False)
            visitors[peer.fileno()] = _Visitor(peer)
            if len(visitors) > _MOST_VISITORS:
                visitors.pop(next(iter(visitors))).socket.close()


class _Visitor:
    """Somebody of our user who has come and may say who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_done = False
        self._heard = b""
        self._patience = Deadline.after(_PATIENCE_S)

    def hear(self, token: str) -> int | None:
        """Its rank, once it has said that and the token; `is_done` when nothing more is to be heard."""
        try:
            data = self.socket.recv(_HELLO.size - len(self._heard))
        except BlockingIOError:
            self.is_done = self._patience.passed
            return None
        except OSError:
            data = b""
        self._heard += data
        if data and len(self._heard) < _HELLO.size:
            return None
        self.is_done = True
        if len(self._heard) != _HELLO.size:
            return None
        said, rank = _HELLO.unpack(self._heard)
        return int(rank) if secrets.compare_digest(said, bytes.fromhex(token)) else None


def _wait(sockets: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Those that can be read. Not `select.select`, which cannot take descriptors from 1024 on."""
    poll = select.poll()
    by_fd = {one.fileno(): one for one in sockets}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(timeout_s * 1000)]


def receive_fds(
    address: FdAddress, rank: int, count: int, deadline: Deadline, *, wait_for_leader: bool = False
) -> list[int]:
    """The `count` file descriptors that the leader at `address` hands out. The caller owns them.

    `wait_for_leader`: it may not listen yet; try until it does. So it always is with one in the abstract
    namespace, which the leader opens when it knows that somebody needs it.

    Raises:
        PhalanxError: the leader is gone, or refused us.
        DeadlineError: it did not answer in time.
    """
    try:
        with contextlib.closing(_connect(address, deadline, wait_for_leader or not address.path)) as s:
            s.settimeout(min(deadline.left_s, 3600.0) or 0.001)
            if peer_of(s).uid != os.getuid():
                raise PhalanxError("the leader of this host runs as another user; nothing was exchanged")
            s.sendall(_HELLO.pack(bytes.fromhex(address.token), rank))
            fds, cut_short = _receive(s, count)
    except TimeoutError:
        raise DeadlineError("the leader of this host did not hand over the shared memory in time") from None
    except OSError as error:
        raise PhalanxError(f"the leader of this host cannot be reached: {error}") from None
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        if cut_short:  # by the kernel, which found no free number
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PhalanxError(
                f"this process may have {soft} open files, and {count} more are needed for the memory of this host "
                "(ulimit -n)"
            )
        raise PhalanxError(
            f"the first rank of this host ended the connection after {len(fds)} of {count} file descriptors: "
            "read its log"
        )
    return fds


_NOT_YET = (errno.ECONNREFUSED, errno.ENOENT)
_CROWDED = (errno.EAGAIN, errno.EINTR, errno.ENOTCONN)  # its queue is full; or a signal came


def _connect(address: FdAddress, deadline: Deadline, wait: bool) -> socket.socket:
    """A connection. Whoever waits in a full queue stands in line there: asking again and again would be pushing in."""
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            slice_s = min(max(deadline.left_s, 0.01), _SLICE_S)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECONDS.pack(int(slice_s), int(slice_s % 1 * 1e6)))
            s.connect(address.socket_address)
            return s
        except OSError as error:
            s.close()
            if address.path and error.errno in (errno.EACCES, errno.EPERM):  # a leader that may not be looked into
                address, wait = FdAddress(address.token), True
            elif error.errno not in _CROWDED and not (wait and error.errno in _NOT_YET):
                raise
            if deadline.passed:
                raise TimeoutError from None
            time.sleep(min(_PAUSE_S, deadline.left_s) if error.errno not in _CROWDED else 0.0)
        except BaseException:
            s.close()
            raise


def _receive(s: socket.socket, count: int) -> tuple[list[int], bool]:
    """The descriptors that came, and whether the kernel held some back."""
    numbers = array.array("i")
    _, ancillary, flags, _ = s.recvmsg(2, socket.CMSG_SPACE(count * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers), bool(flags & socket.MSG_CTRUNC)
