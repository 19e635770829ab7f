"""Send and receive from rank to rank: receives match by sender and tag, and sends that must wait use threads.

Each peer has a thread of its own, in which a send that would wait goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.arguments import ArgumentError, check_rank, one
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.process_group.base import ProcessGroupBase
from phalanx._comm.backend.process_group.entry import entry_point
from phalanx._comm.backend.work import Closable, PhalanxWork, SerialExecutor
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group.inbox import Inbox

_ANYBODY = -1
_SINGLE = "takes a single tensor"
_LINGER_S = 1.0
_MANY = 64  # channels, before those that nobody uses are forgotten


@untraced
class ProcessGroupMessages(ProcessGroupBase):
    """It provides send, recv and recv from any rank. Messages between two ranks arrive in order per tag.

    A posted receive waits for no other with another tag. Where ranks share memory `inbox` matches them; elsewhere those
    of one peer and tag run in the order in which they were posted, in a thread that ends when there are no more.

    Shape: any, contiguous or not; the receiver's tensor has as many bytes as the sender's.
    Cost: on one host two copies, through memory that both map; what is sent before its receive waits there.

    Raises:
        ValueError, TypeError: an argument that is wrong whatever the peer does; nothing was sent.
        MismatchError: the message does not fit the receiver's tensor, which was not changed.
        PeerLostError, DeadlineError, ClosedError: as for collectives, of the one peer.
    """

    def _connect(self, *args: Any, **kwargs: Any) -> None:
        super()._connect(*args, **kwargs)
        self._channels: dict[tuple[str, int, int], SerialExecutor] = {}
        self._inbox: Inbox | None = None
        if self._shared_memory is not None:
            from phalanx._comm.backend.process_group.inbox import Inbox  # needs the C core, which such a group has

            self._inbox = Inbox(self._shared_memory, self._name)

    @entry_point
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Send the tensor; the work is over when it may be changed again, which may be before the receiver has it."""
        tensor = one(tensors, "send", words=_SINGLE)
        self._check_peer(dst, "send", "dst")
        ctx = self._call_context(None, 3)
        executor = self._channels.get(("send", dst, 0))
        if self._shared_memory is not None and (executor is None or executor.idle):
            try:
                if self._shared_memory.send_now(tensor, dst, tag, ctx):
                    return self._done
            except PhalanxError as error:  # heard by whoever waits, as that of a send that takes time
                return _failed(error, [tensor])
        return self._queue(
            self._channel("send", dst, tag), lambda: self.transport.send(tensor, dst, tag, ctx), [tensor]
        )

    @entry_point
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        """Receive the tensor; the work is over when the tensor holds the message."""
        tensor = one(tensors, "recv", words=_SINGLE, written=True)
        self._check_peer(src, "recv", "src")
        return self._receive(tensor, src, tag)

    @entry_point
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive as `recv` does, from the first rank that sends; `source_rank()` of the work says which it was."""
        tensor = one(tensors, "recv", words=_SINGLE, written=True)
        if self._size == 1:
            raise ArgumentError("recv: the group has one rank, so there is nobody to receive from")
        return self._receive(tensor, _ANYBODY, tag)

    def _receive(self, tensor: Tensor, src: int, tag: int) -> dist.Work:
        ctx = self._call_context(None, 4)
        if self._inbox is not None:
            posted = self._inbox.post(tensor, src, tag, ctx)
            if isinstance(posted, PhalanxWork):
                self._recent.append(posted)
            return posted
        work = PhalanxWork([tensor])
        self._recent.append(work)

        def action() -> None:
            work._source = self.transport.recv(tensor, src, tag, ctx)

        return self._channel("recv", src, tag).put(action, work)

    def _check_peer(self, peer: int, operation: str, name: str) -> None:
        check_rank(peer, self._size, operation, name)
        if peer == self._rank:
            raise ArgumentError(f"{operation}: {name} is {peer}, which is this rank itself")

    def _channel(self, direction: str, peer: int, tag: int) -> SerialExecutor:
        if self._inbox is not None:
            return self._lane_of((direction, peer, 0), None)
        # A receive from anybody looks into every channel, so then all receives with its tag share one executor.
        if direction == "recv" and ("recv", _ANYBODY, tag) in self._channels:
            peer = _ANYBODY
        if len(self._channels) >= _MANY:
            for key in [key for key, executor in self._channels.items() if executor.is_over]:
                del self._channels[key]
        return self._lane_of((direction, peer, tag), _LINGER_S)

    def _lane_of(self, key: tuple[str, int, int], linger_s: float | None) -> SerialExecutor:
        if key not in self._channels:
            direction, peer, tag = key
            who = "any" if peer < 0 else str(peer)
            what = f"{direction} {'to' if direction == 'send' else 'from'} rank {who}"
            interrupted = partial(self._interrupted, what=what, peer=peer) if self._interrupted else None
            name = f"phalanx-{self._name}-{direction}-{who}"
            executor = SerialExecutor(name, interrupted=interrupted, linger_s=linger_s)
            if peer == _ANYBODY:
                self._queue(executor, self._end_receives(tag), [])
            self._channels[key] = executor
        return self._channels[key]

    def _end_receives(self, tag: int) -> Callable[[], None]:
        """Return the executor's first action for receives from any rank: it waits until earlier receives are over."""
        keys = [key for key in self._channels if (key[0], key[2]) == ("recv", tag)]
        executors = [self._channels.pop(key) for key in keys]
        return lambda: _close_all(executors, self._timeout_s)

    def _executors(self) -> list[Closable]:
        return [*super()._executors(), *self._channels.values(), *([self._inbox] if self._inbox is not None else [])]


def _close_all(executors: Sequence[SerialExecutor], timeout_s: float) -> None:
    for executor in executors:
        executor.close(timeout_s)


def _failed(error: PhalanxError, outputs: list[Tensor]) -> dist.Work:
    work = PhalanxWork(outputs)
    work.settle(error)
    work.release()
    return work
