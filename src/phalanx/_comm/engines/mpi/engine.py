"""`MpiEngine` sends messages between the ranks of a group over MPI, and detects when a rank leaves the group."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._base.threads import call_in_thread
from phalanx._comm.engines.engine import DATA, timedelta_of
from phalanx._comm.engines.mpi.runtime import Runtime, wait_until

# How long a wait continues after the peer has announced that it leaves, because the message may still be in transit.
_GRACE_S = 0.2
_DEPARTURE_S = 0.05
_ANYBODY = -1
_SHORT = 0x7FFFFFFE  # the tag of short messages: not the user's, not of collectives' data, not of preceding messages


class EngineClosed(RuntimeError):
    """This rank has left the group."""


class TimedOut(RuntimeError):
    """The deadline has passed; the operation continues."""


class PeerLeft(RuntimeError):
    """Rank `peer`, for which this rank waited, has left the group."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} has left the group")
        self.peer = peer


class PendingOperation:
    """A `PendingOperation` is an MPI operation with its memory, which stays alive while MPI may access it.

    `start` returns MPI's request, or None if there is no message to receive yet; then `test` calls `start` again.
    """

    def __init__(
        self, engine: MpiEngine, start: Callable[[], Any], memory: Any, peer: int = _ANYBODY, *, receives: bool = False
    ) -> None:
        self._engine = engine
        self._start = start
        self._request = start()
        self._memory = memory
        self._peer = peer
        self._receives = receives
        self._error: RuntimeError | None = None
        self._testing = threading.Lock()
        self.status = engine.runtime.mpi.Status()
        self.is_over = False

    def test(self) -> bool:
        """Poll MPI, and return whether the operation is complete.

        Raises:
            RuntimeError: MPI reports an error, or this rank has left.
        """
        with self._testing:
            if not self.is_over:
                try:
                    if not self._ask():
                        return False
                except self._engine.runtime.mpi.Exception as error:
                    self._error = error
                self._end()
            if self._error is not None:
                raise self._error
            return True

    def _ask(self) -> bool:
        if self._request is None:
            self._request = self._start()
            if self._request is None:
                return False
        return bool(self._request.Test(self.status))

    def _end(self) -> None:
        if self._receives and self._error is None and self.status.Is_cancelled():
            self._error = EngineClosed("this rank has left the group")
        self.is_over = True
        self._engine._forget(self)

    def give_up(self) -> bool:
        """Stop the operation, and cancel it if it is a receive; return whether MPI has released the memory."""
        with self._testing:
            if self._request is None:
                self._error = EngineClosed("this rank has left the group")
                self._end()
                return True
        with contextlib.suppress(RuntimeError):
            if self._receives:
                self._request.Cancel()
            return self.test()
        return True

    def wait(self, timeout: timedelta) -> None:
        """Wait until the operation is complete.

        Raises:
            TimedOut, EngineClosed, PeerLeft: the operation has not completed.
            RuntimeError: as `test`.
        """

        def is_done() -> bool:
            if self._engine.is_closed and not self.is_over:
                raise EngineClosed("this rank has left the group")
            return self.test()

        timeout_s = timeout.total_seconds()
        if not wait_until(is_done, PeerWatch(self._engine, self._peer).check, timeout_s):
            raise TimedOut(f"no answer within {timeout_s:.1f} s")

    def _source_rank(self) -> int:
        return int(self.status.Get_source())


class PeerWatch:
    """A `PeerWatch` checks, during one wait, whether the awaited rank has left."""

    def __init__(self, engine: MpiEngine, peer: int) -> None:
        self._engine = engine
        self._peer = peer
        self._left: Deadline | None = None

    def check(self) -> None:
        """Raise PeerLeft once the awaited rank, or every rank that could send, has been gone for `_GRACE_S`."""
        engine = self._engine
        if self._peer >= 0:
            gone = [self._peer] if self._peer in engine.departed else []
        else:
            gone = sorted(engine.departed) if len(engine.departed) == engine.world_size - 1 else []
        if gone:
            self._left = self._left or Deadline.after(_GRACE_S)
            if self._left.passed:
                raise PeerLeft(gone[0])


class MpiEngine:
    """An `MpiEngine` sends messages between a group's ranks. All ranks create theirs together, and wait for each other.

    Sends and receives start at once; MPI makes progress on all of them while this process waits for any. A rank that
    leaves notifies all others.

    Raises:
        TimedOut: some rank did not join within `timeout`.
        RuntimeError: MPI cannot create a communicator (most MPIs support a few thousand).
    """

    name = "mpi"
    is_interruptible = True  # waits poll

    def __init__(self, runtime: Runtime, world_ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        mpi = runtime.mpi
        runtime.sweep()
        self.runtime = runtime
        self.rank = rank
        self.world_size = len(world_ranks)
        self.departed: set[int] = set()
        self.is_closed = False
        self._underway: set[PendingOperation] = set()
        self._unread: list[tuple[Any, bytearray]] = []  # messages to this rank that it had not received when it left
        self._guard = threading.RLock()
        everybody = mpi.COMM_WORLD.Get_group()
        group = everybody.Incl(list(world_ranks))
        self.comm = self._in_time(lambda: mpi.COMM_WORLD.Create_group(group, _tag_of(world_ranks)), timeout)
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        group.Free()
        everybody.Free()
        # MPI guarantees 15 bits of tags; 20 or 29 are common. Messages get the lower half, collectives the upper half.
        self._half = 1 << ((int(self.comm.Get_attr(mpi.TAG_UB)) + 1).bit_length() - 2)
        self.short_messages = MpiShortMessages(self)
        self._departure_tag = 2 * self._half - 1  # not a collective's tag, whose last twelve bits are never all set
        runtime.add_listener(self.listen)

    def _in_time(self, call: Callable[[], Any], timeout: timedelta) -> Any:
        """Run `call`, which has no non-blocking variant, in a thread; return its result, or raise TimedOut."""
        created = call_in_thread(call, "phalanx-mpi-create")
        if not wait([created], timeout.total_seconds()).done:
            self.runtime.abandoned.append(created)
            raise TimedOut(f"some rank did not join within {timeout.total_seconds():.1f} s")
        return created.result()

    @property
    def num_tags(self) -> int:
        """Return the number of tags for the user's messages, whose tags must be below this number."""
        return min(self._half, DATA)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, dst: int, tensor: Tensor, tag: int) -> PendingOperation:
        """Start a send of a contiguous tensor."""
        data = self._bytes(tensor)
        return self._begin(lambda: self.comm.Isend(data, dst, self._tag(tag)), tensor, dst)

    def recv(self, src: int, tensor: Tensor, tag: int) -> PendingOperation:
        """Start a receive into a contiguous tensor."""
        data = self._bytes(tensor)
        return self._begin(lambda: self.comm.Irecv(data, src, self._tag(tag)), tensor, src, receives=True)

    def recv_any(self, tensor: Tensor, tag: int) -> PendingOperation:
        """Start a receive from the first rank that sends; after the wait, `_source_rank()` returns the rank.

        The message is probed before it is received: on hosts with several ranks, MPICH 5.0.2 over UCX does not match a
        receive from any rank with a message that arrived before the receive was posted.
        """
        data, anybody = self._bytes(tensor), self.runtime.mpi.ANY_SOURCE

        def start() -> Any:
            message = self.comm.Improbe(anybody, self._tag(tag))
            return None if message is None else message.Irecv(data)

        return self._begin(start, tensor, receives=True)

    def _begin(
        self, start: Callable[[], Any], memory: Tensor | None, peer: int = _ANYBODY, *, receives: bool = False
    ) -> PendingOperation:
        """Start an operation on a tensor's memory; `start` returns MPI's request, as for `PendingOperation`."""
        with self._guard:
            if self.is_closed:
                raise EngineClosed("this rank has left the group")
            operation = PendingOperation(self, start, memory, peer, receives=receives)
            self._underway.add(operation)
            return operation

    def _bytes(self, tensor: Tensor) -> list[Any]:
        """Return a contiguous tensor's bytes, in place, for MPI."""
        mpi = self.runtime.mpi
        return [mpi.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size()), mpi.BYTE]

    def _tag(self, tag: int) -> int:
        return tag if tag < DATA else self._half | (tag & (self._half - 1))

    def _forget(self, operation: PendingOperation) -> None:
        self._underway.discard(operation)  # takes no lock: `close` holds the lock while it tests operations

    def check(self, peer: int) -> None:
        """Do nothing: a waiting thread is notified when a peer has left."""

    # -- the end -------------------------------------------------------------------------------------------------

    def listen(self) -> bool:
        """Receive the empty messages by which ranks announce that they leave; return False once this rank has left."""
        with self._guard:
            if not self.is_closed:
                self._receive_departures()
            return not self.is_closed

    def _receive_departures(self) -> None:
        mpi, status = self.runtime.mpi, self.runtime.mpi.Status()
        while (probed := self.comm.Improbe(mpi.ANY_SOURCE, self._departure_tag, status)) is not None:
            probed.Recv([None, 0, mpi.BYTE])
            self.departed.add(int(status.Get_source()))

    def _notify_departure(self, peer: int) -> PendingOperation:
        mpi = self.runtime.mpi
        return self._begin(lambda: self.comm.Isend([None, 0, mpi.BYTE], peer, self._departure_tag), None, peer)

    def deliver(self, deadline: Deadline) -> None:
        """Do nothing: MPI delivers sent data even after this rank has left."""

    def close(self) -> None:
        """Leave at once: notify all other ranks, and wake the threads that wait here."""
        with self._guard:
            if self.is_closed:
                return
            if self.runtime.is_over:
                self.is_closed = True
                return
            with contextlib.suppress(RuntimeError):
                notices = [self._notify_departure(peer) for peer in range(self.world_size) if peer != self.rank]
                wait_until(lambda: all([one.test() for one in notices]), lambda: None, _DEPARTURE_S)
            self.is_closed = True
            unfinished = [one for one in list(self._underway) if not one.give_up()]
            if unfinished:
                self.runtime.abandoned.extend(unfinished)
            else:
                self.runtime.pending_frees.append(self._is_free)
                self.runtime.sweep()

    def free(self) -> None:
        """Do nothing: the communicator is freed once all other ranks have left, too (see `_is_free`)."""

    def _is_free(self) -> bool:
        """Free the communicator once all others have left and every message is received; return whether it is freed.

        MPI reuses the context id for the next communicator, which would then receive a late rank's remaining messages.
        """
        mpi, status = self.runtime.mpi, self.runtime.mpi.Status()
        with self._guard:
            self._receive_departures()
            if len(self.departed) < self.world_size - 1:
                return False
            while (probed := self.comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
                data = bytearray(status.Get_count(mpi.BYTE))
                self._unread.append((probed.Irecv([data, mpi.BYTE]), data))
            if not all([request.Test() for request, _ in self._unread]):
                return False
            self.comm.Free()
            return True


class MpiShortMessages:
    """`MpiShortMessages` are messages with a tag of their own. Flush before the next one to the same peer."""

    def __init__(self, engine: MpiEngine) -> None:
        self._engine = engine
        self._sent: dict[int, PendingOperation] = {}

    def send(self, peer: int, message: memoryview) -> None:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._sent[peer] = self._engine.send(peer, data, _SHORT)

    def receive(self, peer: int, buffer: memoryview, deadline: Deadline) -> None:
        self._engine.recv(peer, torch.frombuffer(buffer, dtype=torch.uint8), _SHORT).wait(timedelta_of(deadline))

    def flush(self, deadline: Deadline) -> None:
        for peer in list(self._sent):
            self._sent.pop(peer).wait(timedelta_of(deadline))


def _tag_of(world_ranks: Sequence[int]) -> int:
    """Return a tag that distinguishes groups of different ranks that are created at the same time."""
    digest = hashlib.blake2b(repr(list(world_ranks)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") >> 1  # MPI guarantees tags up to 32767
