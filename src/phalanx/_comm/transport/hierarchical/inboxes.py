"""Receives that are posted several operations ahead, and the wait of a leader for their messages.

Several receives are posted at once: Gloo requires the receiver's answer before it sends, and so has it already. If the
engine's waits ignore signals, a leader polls the memory of the message for a moment, and then has a thread wait for the
message.
"""

from __future__ import annotations

import ctypes
import os
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import Engine, InTransit
from phalanx._comm.transport.background import LOOK_EVERY_S, WHOLE_BYTES, Background, get_soon, look_at
from phalanx._comm.transport.hierarchical.rails import (
    FINGERPRINT,
    FOR_EVER,
    ConnectionBroken,
    NotBegun,
    talking_to,
    timedelta_of,
)

_AHEAD = 8  # operations for which receives are posted; a peer may be one ahead of this host
_TOGETHER = 6  # posted at once: the peer's threads wake up once for them
_LOOKS = 200  # polls of memory for a message's first bytes, before a thread waits for it
# A poll takes so long only if another thread wanted this core, perhaps the one that receives the message. So many
# messages are not polled after that.
_CROWDED_S = 2e-5
_WITHOUT_LOOKS = 50


class MessageBuffer:
    """A `MessageBuffer` is memory for one message."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.first_word = ctypes.c_uint32.from_address(self.address)
        self.pending: InTransit | None = None
        self._part = self.tensor

    def first(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` as a tensor, cached for the usual case of the same size as before."""
        if len(self._part) != nbytes:
            self._part = self.tensor[:nbytes]
        return self._part


class Inboxes:
    """`Inboxes` receive one message of each sender in each operation. The first word of a message is never zero.

    Arguments:
        senders: the sending rank, by the caller's key.
        nbytes: the longest message of each sender.
        length: returns the length of a sender's message that has begun to arrive in a buffer.
    """

    def __init__(
        self,
        engine: Engine,
        senders: Mapping[int, int],
        nbytes: Mapping[int, int],
        length: Callable[[int, MessageBuffer], int],
    ) -> None:
        self._engine = engine
        self._senders = senders
        self._length = length
        self._buffers = {key: [MessageBuffer(nbytes[key]) for _ in range(_AHEAD)] for key in senders}
        self._number = 0
        self._background = Background()
        self._without_looks = 0  # how many of the next messages are not polled
        self._used = 0  # slots whose messages were used, and that are not posted again
        for slot in range(_AHEAD):
            self._post(slot)

    def receive(self, key: int, deadline: Deadline) -> MessageBuffer:
        """Return this operation's message of a sender; it is valid until `done`.

        Raises:
            ConnectionBroken: the sender is lost or late.
        """
        inbox, peer = self._buffers[key][self._number % _AHEAD], self._senders[key]
        if self._engine.is_interruptible or (self._sees(inbox) and self._length(key, inbox) <= WHOLE_BYTES):
            assert inbox.pending is not None
            with talking_to(peer):
                inbox.pending.wait(timedelta_of(deadline))
        else:
            self._await(inbox, peer, deadline)
        return inbox

    def _sees(self, inbox: MessageBuffer) -> bool:
        """Return whether a message begins to arrive within a moment, in which other threads may use this core.

        If they do use it, polling only delays the engine's thread: then the next messages are not polled.
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

    def _await(self, inbox: MessageBuffer, peer: int, deadline: Deadline) -> None:
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
            if inbox.first_word.value:  # a message may end in the middle, and Gloo would not report that
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
        """Reuse the memory of this operation's messages for others."""
        self._number += 1
        self._used += 1
        if self._used == _TOGETHER:
            for number in range(self._number - self._used, self._number):
                self._post(number % _AHEAD)
            self._used = 0

    def _post(self, slot: int) -> None:
        for key, peer in self._senders.items():
            inbox = self._buffers[key][slot]
            inbox.first_word.value = 0
            try:
                inbox.pending = self._engine.recv(peer, inbox.tensor, FINGERPRINT)
            except RuntimeError as error:  # it has left: no completed operation needs it
                inbox.pending = NotBegun(error)

    def close(self) -> None:
        """Release the messages after the engine is closed: nothing else ends receives without a sender."""
        self._background.close()
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.pending = None  # the engine's sockets live as long as a pending message
