"""The hosts' leaders begin every operation with one message: what their ranks call, and small tensors with it.

    leader of host A  ──heads of A's ranks, payload──>  leader of host B      (and the other way, at the same time)

One message each way is all that a small operation costs between hosts. Receives are posted several operations ahead,
several at once: Gloo asks the receiver before it sends, and so it has the answer already. A message says how long it
is, so one that its receiver did not expect (another operation, another size) still arrives, and is told for what it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx.deadline import Deadline
from phalanx.engines.engine import Engine, Pending
from phalanx.transport.background import LOOK_EVERY_S, WHOLE_BYTES, Background, get_soon, look_at
from phalanx.transport.call import HEAD_BYTES, agree
from phalanx.transport.hierarchical.layout import Layout
from phalanx.transport.hierarchical.rails import (
    FINGERPRINT,
    FOR_EVER,
    ConnectionBroken,
    NotBegun,
    talking_to,
    timedelta_of,
)

# A rank may bring so much to, or take so much from, an operation whose data travel with its heads, for each other host.
SMALL_BYTES = 2**18
_AHEAD = 8  # operations for which receives are posted; a peer may be one further than this host
_TOGETHER = 6  # so many are posted at once: the peer's threads wake up once for them
_SENT = 2
_LOOKS = 200  # at memory, for a message's first bytes, before a thread is asked to wait for it
# A look takes so long only if another thread wanted this core, perhaps the one that brings the message. So many
# messages are not looked for after that.
_CROWDED_S = 2e-5
_WITHOUT_LOOKS = 50
_PREFIX = struct.Struct("<II")  # the number of different heads, and the payload's bytes
_ALIGNED = 64


@dataclass(frozen=True)
class HostMessage:
    """It has what another host's ranks call (`heads`, in their order), and its payload until the next operation."""

    heads: Sequence[bytes]
    address: int
    nbytes: int


class _Buffer:
    """A buffer is memory for one message."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.first_word = ctypes.c_uint32.from_address(self.address)
        self.pending: Pending | None = None
        self._part = self.tensor

    def first(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` of it as a tensor; most likely they are as many as the last time."""
        if len(self._part) != nbytes:
            self._part = self.tensor[:nbytes]
        return self._part


class LeaderExchange:
    """It carries the messages between this host's leader and those of the others. Only leaders have one.

    `send` and `receive` alternate, one of each for an operation. The caller of `receive` hears Ctrl-C: where no signal
    is heard while the engine waits, it looks for a message where that will lie, for a moment, and then has a thread
    wait for it.
    """

    def __init__(self, engine: Engine, layout: Layout) -> None:
        self._engine = engine
        self._peers = {host: ranks[0] for host, ranks in enumerate(layout.topology.hosts) if host != layout.host}
        self._sizes = {host: len(layout.topology.hosts[host]) for host in self._peers}
        self.hosts = tuple(self._peers)
        local = len(layout.local_ranks)
        self._scratch = _Buffer(SMALL_BYTES)
        self.scratch = self._scratch.address  # for what the leader makes of its host's payloads
        self._outboxes = {h: [_Buffer(_message_bytes(local)) for _ in range(_SENT)] for h in self._peers}
        self._inboxes = {h: [_Buffer(_message_bytes(n)) for _ in range(_AHEAD)] for h, n in self._sizes.items()}
        self._number = 0
        self._background = Background()
        self._without_looks = 0  # how many of the next messages are not looked for
        self._used = 0  # slots whose messages have been used, and that are not posted again
        for slot in range(_AHEAD):
            self._post(slot)

    def send(
        self, heads: Sequence[bytes], payloads: Mapping[int, Sequence[tuple[int, int]]], deadline: Deadline
    ) -> None:
        """Start to send to each other host the heads of this host's ranks, and payloads[host]: addresses and bytes."""
        distinct = list(dict.fromkeys(heads))
        kinds = bytes([distinct.index(head) for head in heads])
        end_of_heads = _payload_offset(len(heads), len(distinct))
        start = end_of_heads - len(distinct) * HEAD_BYTES
        joined = b"".join(distinct)
        slot = self._number % _SENT
        for host, peer in self._peers.items():
            outbox = self._outboxes[host][slot]
            with talking_to(peer):
                if outbox.pending is not None:  # it is of the operation before the last, and most likely over
                    outbox.pending.wait(timedelta_of(deadline))
                end = end_of_heads
                for address, size in payloads.get(host, ()):
                    ctypes.memmove(outbox.address + end, address, size)
                    end += size
                _PREFIX.pack_into(outbox.bytes, 0, len(distinct), end - end_of_heads)
                outbox.bytes[_PREFIX.size : _PREFIX.size + len(kinds)] = kinds
                outbox.bytes[start:end_of_heads] = joined
                outbox.pending = self._engine.send(peer, outbox.first(end), FINGERPRINT)

    def receive(self, deadline: Deadline) -> dict[int, HostMessage]:
        """Return what each other host sent in this operation; it stays as it is until `done`.

        Raises:
            ConnectionBroken: some host's leader is gone or late.
        """
        return {host: self._receive(host, peer, deadline) for host, peer in self._peers.items()}

    def _receive(self, host: int, peer: int, deadline: Deadline) -> HostMessage:
        inbox = self._inboxes[host][self._number % _AHEAD]
        if self._engine.is_interruptible or (self._sees(inbox) and self._nbytes(inbox, host) <= WHOLE_BYTES):
            assert inbox.pending is not None
            with talking_to(peer):
                inbox.pending.wait(timedelta_of(deadline))
        else:
            self._await(inbox, peer, deadline)
        num_distinct, nbytes = _PREFIX.unpack_from(inbox.bytes)
        size = self._sizes[host]
        start = _payload_offset(size, num_distinct)
        first = start - num_distinct * HEAD_BYTES
        distinct = [bytes(inbox.bytes[at : at + HEAD_BYTES]) for at in range(first, start, HEAD_BYTES)]
        heads = [distinct[kind] for kind in inbox.bytes[_PREFIX.size : _PREFIX.size + size]]
        return HostMessage(heads, inbox.address + start, nbytes)

    def _sees(self, inbox: _Buffer) -> bool:
        """Return whether a message begins to arrive within a moment, in which other threads may have this core.

        Where they do take it, looking only keeps the engine's thread from its work: then the next messages are not
        looked for.
        """
        if self._without_looks > 0:
            self._without_looks -= 1
            return bool(inbox.first_word.value)
        before = time.perf_counter()
        for _ in range(_LOOKS):
            if inbox.first_word.value:
                return True
            os.sched_yield()
            now = time.perf_counter()
            if now - before > _CROWDED_S:
                self._without_looks = _WITHOUT_LOOKS
                break
            before = now
        return bool(inbox.first_word.value)

    def _nbytes(self, inbox: _Buffer, host: int) -> int:
        """Return the length of the message that has begun to arrive; a guess while its first bytes do."""
        num_distinct, nbytes = _PREFIX.unpack_from(inbox.bytes)
        return _payload_offset(self._sizes[host], num_distinct) + int(nbytes)

    def _await(self, inbox: _Buffer, peer: int, deadline: Deadline) -> None:
        assert inbox.pending is not None
        arrived = self._background.start(partial(inbox.pending.wait, FOR_EVER))
        look = look_at(self._engine, peer, partial(ConnectionBroken, peer))
        while True:
            try:
                error = get_soon(arrived, min(timedelta_of(deadline).total_seconds(), LOOK_EVERY_S))
                break
            except queue.Empty:
                if deadline.passed:
                    raise ConnectionBroken(peer, "nothing came in time") from None
            if inbox.first_word.value:  # a message that has begun to come may never end, and Gloo would not tell
                try:
                    look()
                except ConnectionBroken:
                    self._background.over(arrived)
                    raise
        self._background.over(arrived)
        if error is not None:
            with talking_to(peer):
                raise error

    def done(self) -> None:
        """Let the memory of this operation's messages, which have been used, receive others."""
        self._number += 1
        self._used += 1
        if self._used == _TOGETHER:
            for number in range(self._number - self._used, self._number):
                self._post(number % _AHEAD)
            self._used = 0

    def _post(self, slot: int) -> None:
        for host, peer in self._peers.items():
            inbox = self._inboxes[host][slot]
            inbox.first_word.value = 0
            try:
                inbox.pending = self._engine.recv(peer, inbox.tensor, FINGERPRINT)
            except RuntimeError as error:  # it has left: nothing that is over needs it
                inbox.pending = NotBegun(error)

    def flush(self, deadline: Deadline) -> None:
        """Return when all that was sent has been taken, or can't be: a peer needs it even if this host does not."""
        for outboxes in self._outboxes.values():
            for outbox in outboxes:
                if outbox.pending is not None:
                    with contextlib.suppress(RuntimeError):
                        outbox.pending.wait(timedelta_of(deadline))
                    outbox.pending = None

    def close(self) -> None:
        """Let go of the messages after the engine is closed: nothing else ends receives for which nobody sends."""
        self._background.close()
        for buffers in (*self._inboxes.values(), *self._outboxes.values()):
            for buffer in buffers:
                buffer.pending = None  # the engine's sockets live as long as a message on its way


def all_agree(mine: bytes, *hosts: Sequence[bytes]) -> bool:
    """Return whether all ranks of these hosts called what `mine` says."""
    return all([head is mine or agree(mine, head) for heads in hosts for head in heads])


def _payload_offset(num_ranks: int, num_distinct: int) -> int:
    kinds = -(-(_PREFIX.size + num_ranks) // _ALIGNED) * _ALIGNED
    return kinds + num_distinct * HEAD_BYTES


def _message_bytes(num_ranks: int) -> int:
    """Return the largest number of bytes in a message of a host with so many ranks."""
    return _payload_offset(num_ranks, num_ranks) + SMALL_BYTES
