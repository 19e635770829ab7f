"""Send file descriptors to the other ranks of a host, which connect to a `LocalListener`.

A rank first sends the listener's token and its rank. A connection that sends nothing does not delay the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.channel import Channel, ChannelMessage
from phalanx._base.ipc.local_listener import MOST_PENDING, LocalAddress, LocalListener, connect
from phalanx.errors import DeadlineError, PhalanxError

_SLICE_S = 0.5
_HELLO_TIMEOUT_S, _HELLO_BYTES = 5.0, 256  # limits on the time and size of the message with the token and rank

Notice = Callable[[set[int]], None]


class FdServer(LocalListener):
    """An `FdServer` is local rank 0's listener. It takes the arguments of `LocalListener`, and raises its errors."""

    def __enter__(self) -> FdServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()

    def serve(
        self,
        ranks: Sequence[int],
        fds: Sequence[int],
        deadline: Deadline,
        notice: Notice,
        *,
        own: Mapping[int, int] | None = None,
    ) -> None:
        """Send `fds` to each of `ranks` when it connects, followed by the rank's descriptor in `own`, if any.

        `notice` is called with the missing ranks whenever nothing has arrived for half a second.

        Raises:
            DeadlineError: some ranks did not connect; `missing` lists them.
            OSError: this process has no free descriptor for a connection.
        """
        own = own or {}
        missing = set(ranks)
        connections: dict[int, _Connection] = {}
        try:
            while missing:
                is_late = deadline.passed  # the sockets are read once more before this raises
                sources: list[socket.socket | Channel] = [
                    *self.sockets,
                    *(connection.channel for connection in connections.values()),
                ]
                ready = wait_readable(sources, min(_SLICE_S, deadline.left_s))
                for listener in self.sockets:
                    if listener in ready:
                        self._admit(listener, connections)
                for fd, connection in list(connections.items()):
                    rank = connection.read_rank(self.address.token)
                    if rank in missing:
                        with contextlib.suppress(OSError):  # the rank timed out, or died
                            connection.channel.put({}, [*fds, *([own[rank]] if rank in own else [])])
                            if not connection.channel.broken and not connection.channel.waiting:
                                missing.discard(rank)
                    if connection.is_done:
                        connections.pop(fd).channel.close()
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
                connection.channel.close()

    def _admit(self, listener: socket.socket, connections: dict[int, _Connection]) -> None:
        admitted = 0
        try:
            for sock in self.accept(listener):
                admitted += 1
                connections[sock.fileno()] = _Connection(sock)
                if len(connections) > MOST_PENDING:
                    connections.pop(next(iter(connections))).channel.close()
        except OSError:  # no free descriptors
            if not admitted and not connections:
                raise
            if not admitted:
                connections.pop(next(iter(connections))).channel.close()


class _Connection:
    """A `_Connection` is a connection whose peer has not sent the token and its rank yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock, max_bytes=_HELLO_BYTES, max_fds=0)
        self.is_done = False
        self._deadline = Deadline.after(_HELLO_TIMEOUT_S)

    def read_rank(self, token: str) -> int | None:
        """Return the rank once it has arrived with the right token, else None; set `is_done` if no more will arrive."""
        messages = self.channel.receive_available(1)
        self.is_done = bool(messages) or self.channel.is_garbled or self.channel.gone or self._deadline.passed
        hello = messages[0].content if messages else {}
        rank, theirs = hello.get("rank"), str(hello.get("token")).encode()
        return rank if isinstance(rank, int) and secrets.compare_digest(theirs, token.encode()) else None


def receive_fds(
    address: LocalAddress,
    rank: int,
    count: int,
    deadline: Deadline,
    *,
    wait_for_leader: bool = False,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Receive the `count` file descriptors that local rank 0 at `address` serves. The caller owns them.

    If `wait_for_leader`, retry until local rank 0 listens. An address in the abstract namespace is always retried,
    because local rank 0 opens it only when some rank needs it. `check` is called repeatedly during the wait, and may
    raise, for instance if local rank 0 has exited.

    Raises:
        PhalanxError: local rank 0 is lost or refused this process, or this process has too few free descriptors.
        DeadlineError: local rank 0 did not answer in time.
    """
    try:
        sock = _connect(address, deadline, wait_for_leader, check)
        with contextlib.closing(Channel(sock, max_fds=count)) as channel:
            channel.send({"token": address.token, "rank": rank})
            message = _receive(channel, deadline, check)
    except TimeoutError:
        raise DeadlineError("local rank 0 of this host did not send the shared memory in time") from None
    except OSError as error:
        raise PhalanxError(f"local rank 0 of this host cannot be reached: {error}") from None
    fds = [] if message is None else list(message.fds)
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        if channel.has_lost_fds:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PhalanxError(
                f"this process may have at most {soft} open files, but the memory of this host needs {count} more "
                "(ulimit -n)"
            )
        raise PhalanxError(
            f"local rank 0 of this host closed the connection after {len(fds)} of {count} file descriptors: "
            "read its log"
        )
    return fds


def _connect(address: LocalAddress, deadline: Deadline, wait: bool, check: Callable[[], None]) -> socket.socket:
    whose = "local rank 0 on this host"
    if address.path:
        try:
            return connect(address, deadline, whose, retry=wait, check=check)
        except OSError as error:
            # /proc/PID is unreadable if the process is in another container or, for ordinary users, if it has exited.
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
    return connect(address.for_containers, deadline, whose, retry=True, check=check)


def _receive(channel: Channel, deadline: Deadline, check: Callable[[], None]) -> ChannelMessage | None:
    while True:
        try:
            return channel.receive(Deadline.after(min(_SLICE_S, deadline.left_s)))
        except TimeoutError:
            if deadline.passed:
                raise
            check()
