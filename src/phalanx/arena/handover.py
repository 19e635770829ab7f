"""Hand file descriptors to the other ranks of a host over a Unix socket that has no file.

The socket's name lies in Linux's abstract namespace and is 128 random bits that only the job's store knows; the
kernel vouches for the user on the other side (`SO_PEERCRED`), and whoever is not us is turned away.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from phalanx.arena.peer import peer_of
from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError, PhalanxError

_SLICE_S = 0.5
_PATIENCE_S = 5.0  # with a visitor that says nothing; those behind it wait
_HELLO = struct.Struct("16sI")

Notice = Callable[[set[int]], None]


def new_token() -> str:
    """128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def _address(token: str) -> str:
    return f"\0phalanx-{token}"


class Counter:
    """The leader's side: a listening socket from construction, so that nobody can come too early."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(_address(token))
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()

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
        while missing:
            ready, _, _ = select.select([self._socket], [], [], min(_SLICE_S, deadline.left_s))
            if not ready:
                if deadline.passed:
                    raise DeadlineError(
                        f"ranks {sorted(missing)} did not fetch the memory", missing=tuple(sorted(missing))
                    )
                notice(missing)
                continue
            with contextlib.closing(self._socket.accept()[0]) as peer:
                rank = self._admit(peer, min(_PATIENCE_S, deadline.left_s))
                if rank in missing:
                    with contextlib.suppress(OSError):  # it gave up, or died, while it stood in line
                        socket.send_fds(peer, [b"ok"], [*fds, *([own[rank]] if rank in own else [])])
                        missing.discard(rank)

    def _admit(self, peer: socket.socket, patience_s: float) -> int | None:
        """The rank of a visitor who is our user and knows the token, else None."""
        peer.settimeout(max(patience_s, 0.01))  # zero would mean: do not block at all
        if peer_of(peer).uid != os.getuid():
            return None
        try:
            hello = peer.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:  # it died or dawdled; the next one may be better
            return None
        if len(hello) != _HELLO.size:
            return None
        token, rank = _HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(token, bytes.fromhex(self.token)) else None


def fetch(token: str, rank: int, count: int, deadline: Deadline, *, wait_for_leader: bool = False) -> list[int]:
    """The `count` file descriptors that the leader with `token` hands out. The caller owns them.

    `wait_for_leader`: its door may not be open yet; knock until it is.

    Raises:
        PhalanxError: the leader is gone, or refused us.
        DeadlineError: it did not answer in time.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)) as s:
        s.settimeout(min(deadline.left_s, 3600.0) or 0.001)
        try:
            _connect(s, token, deadline if wait_for_leader else None)
            if peer_of(s).uid != os.getuid():
                raise PhalanxError("the leader of this host runs as another user; nothing was exchanged")
            s.sendall(_HELLO.pack(bytes.fromhex(token), rank))
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
        raise PhalanxError(f"the leader of this host closed the door: {len(fds)} of {count} descriptors came")
    return fds


def _connect(s: socket.socket, token: str, patience: Deadline | None) -> None:
    while True:
        try:
            s.connect(_address(token))
            return
        except ConnectionRefusedError:
            if patience is None:
                raise
            if patience.passed:
                raise TimeoutError from None
            time.sleep(0.01)


def _receive(s: socket.socket, count: int) -> tuple[list[int], bool]:
    """The descriptors that came, and whether the kernel held some back."""
    numbers = array.array("i")
    _, ancillary, flags, _ = s.recvmsg(2, socket.CMSG_SPACE(count * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers), bool(flags & socket.MSG_CTRUNC)
