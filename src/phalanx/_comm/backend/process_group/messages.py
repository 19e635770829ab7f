"""Point-to-point messages: receives match by sender and tag, and sends that must wait run in threads.

A send that would wait runs in the thread of its peer. `send`, `recv` and `recv_anysource` are methods of
`PhalanxProcessGroup`; their state is in the group's `GroupMessages`.

Shape: any, contiguous or not; the receiver's tensor has as many bytes as the sender's.
Cost: on one host two copies, through shared memory, where a message waits until its receive is posted.

Raises:
    ValueError, TypeError: an argument that is wrong whatever the peer does; nothing was sent.
    MismatchError: the message does not fit the receiver's tensor, which was not changed.
    PeerLostError, DeadlineError, ClosedError: as for collectives, but only for this peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.arguments import ArgumentError, check_rank, one
from phalanx._comm.backend.work import Closable, PhalanxWork, RecentWorks, SerialExecutor
from phalanx._comm.transport.base import Transport
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group.group import Members, PhalanxProcessGroup
    from phalanx._comm.backend.process_group.inbox import Inbox
    from phalanx._comm.transport.shared_memory import SharedMemoryTransport

_ANYBODY = -1
_SINGLE = "takes a single tensor"
_LINGER_S = 1.0
_MANY = 64  # if there are this many channels, unused channels are deleted


class GroupMessages:
    """`GroupMessages` holds the state of a group's messages. Between two ranks, messages arrive in order per tag.

    A posted receive does not wait for receives with other tags. If ranks share memory, `inbox` matches the receives;
    otherwise the receives from a peer with a tag run in the order of posting, in a thread that ends when none is left.
    """

    def __init__(
        self,
        transport: Transport,
        memory: SharedMemoryTransport | None,
        members: Members,
        interrupted: Callable[..., None] | None,
        recent_works: RecentWorks,
    ) -> None:
        self._transport = transport
        self._members = members
        self._interrupted = interrupted
        self._recent_works = recent_works
        self.channels: dict[tuple[str, int, int], SerialExecutor] = {}
        """The executors by direction, peer and tag."""
        self.inbox: Inbox | None = None
        """The posted receives, if ranks share memory; otherwise None."""
        if memory is not None:
            from phalanx._comm.backend.process_group.inbox import Inbox  # imported here, because it needs the C core

            self.inbox = Inbox(memory, transport.group)

    def check_peer(self, peer: int, operation: str, name: str) -> None:
        """Raise an ArgumentError unless `peer` is another rank of the group."""
        check_rank(peer, self._members.size, operation, name)
        if peer == self._members.rank:
            raise ArgumentError(f"{operation}: {name} is {peer}, which is this rank itself")

    def channel(self, direction: str, peer: int, tag: int, timeout_s: float) -> SerialExecutor:
        """Return the executor for a message that must wait; earlier receives have `timeout_s` to complete."""
        if self.inbox is not None:
            return self._executor_of((direction, peer, 0), None, timeout_s)
        # A receive from any rank matches every channel, so all receives with its tag then share one executor.
        if direction == "recv" and ("recv", _ANYBODY, tag) in self.channels:
            peer = _ANYBODY
        if len(self.channels) >= _MANY:
            for key in [key for key, executor in self.channels.items() if executor.is_over]:
                del self.channels[key]
        return self._executor_of((direction, peer, tag), _LINGER_S, timeout_s)

    def _executor_of(self, key: tuple[str, int, int], linger_s: float | None, timeout_s: float) -> SerialExecutor:
        if key not in self.channels:
            direction, peer, tag = key
            who = "any" if peer < 0 else str(peer)
            what = f"{direction} {'to' if direction == 'send' else 'from'} rank {who}"
            interrupted = partial(self._interrupted, what=what, peer=peer) if self._interrupted else None
            name = f"phalanx-{self._transport.group}-{direction}-{who}"
            executor = SerialExecutor(name, interrupted=interrupted, linger_s=linger_s)
            if peer == _ANYBODY:
                work = PhalanxWork([])
                self._recent_works.append(work)
                executor.put(self._close_receives(tag, timeout_s), work)
            self.channels[key] = executor
        return self.channels[key]

    def _close_receives(self, tag: int, timeout_s: float) -> Callable[[], None]:
        """Return the first action of the executor of any-source receives: it waits for the earlier receives."""
        keys = [key for key in self.channels if (key[0], key[2]) == ("recv", tag)]
        executors = [self.channels.pop(key) for key in keys]
        return lambda: _close_all(executors, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait for queued sends and posted receives; return whether all completed within `timeout_s`."""
        deadline = Deadline.after(timeout_s)
        parts: list[Closable] = [*self.channels.values(), *([self.inbox] if self.inbox is not None else [])]
        return all([part.close(deadline.left_s) for part in parts])


def send(group: PhalanxProcessGroup, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
    """Send the tensor. The work completes when the tensor may be changed again, perhaps before the peer receives it."""
    tensor = one(tensors, "send", words=_SINGLE)
    messages, memory = group.messages, group.shared_memory
    messages.check_peer(dst, "send", "dst")
    ctx = group.call_context(None)
    executor = messages.channels.get(("send", dst, 0))
    if memory is not None and (executor is None or executor.idle):
        try:
            if memory.send_now(tensor, dst, tag, ctx):
                return group.done_work
        except PhalanxError as error:  # `wait` raises it, as for a send in the background
            return _failed(error, [tensor])
    channel = messages.channel("send", dst, tag, group.timeout_s)
    return group.enqueue(channel, lambda: group.transport.send(tensor, dst, tag, ctx), [tensor])


def recv(group: PhalanxProcessGroup, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
    """Receive the tensor. The work completes when the tensor holds the message."""
    tensor = one(tensors, "recv", words=_SINGLE, written=True)
    group.messages.check_peer(src, "recv", "src")
    return _receive(group, tensor, src, tag)


def recv_anysource(group: PhalanxProcessGroup, tensors: Sequence[Tensor], tag: int) -> dist.Work:
    """Receive as `recv` does, from the first rank that sends; the work's `source_rank()` returns that rank."""
    tensor = one(tensors, "recv", words=_SINGLE, written=True)
    if group.members.size == 1:
        raise ArgumentError("recv: the group has one rank, so there is no rank to receive from")
    return _receive(group, tensor, _ANYBODY, tag)


def _receive(group: PhalanxProcessGroup, tensor: Tensor, src: int, tag: int) -> dist.Work:
    ctx = group.call_context(None)
    inbox = group.messages.inbox
    if inbox is not None:
        posted = inbox.post(tensor, src, tag, ctx)
        if isinstance(posted, PhalanxWork):
            group.recent_works.append(posted)
        return posted
    work = PhalanxWork([tensor])
    group.recent_works.append(work)

    def action() -> None:
        work.source = group.transport.recv(tensor, src, tag, ctx)

    return group.messages.channel("recv", src, tag, group.timeout_s).put(action, work)


def _close_all(executors: Sequence[SerialExecutor], timeout_s: float) -> None:
    for executor in executors:
        executor.close(timeout_s)


def _failed(error: PhalanxError, outputs: list[Tensor]) -> dist.Work:
    work = PhalanxWork(outputs)
    work.complete(error)
    work.wake_waiters()
    return work
