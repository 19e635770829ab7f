"""Post the receives of a leader several operations ahead, and wait for their messages.

Gloo sends a message only once the receiver has posted its receive, and has notified the sender. If receives are posted
ahead, the notification has already arrived. If the engine's waits ignore signals, a leader first polls the memory of
the message for a few milliseconds, and sleeps between polls until data arrive. If the message is not complete by then,
another thread waits for it.
"""

from __future__ import annotations

import ctypes
import os
import queue
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import FOR_EVER, Engine, PendingMessage, timedelta_of
from phalanx._comm.transport.background import LOOK_EVERY_S, WHOLE_BYTES, Background, get_soon, look_at
from phalanx._comm.transport.hierarchical.rails import (
    FINGERPRINT,
    ConnectionBroken,
    RejectedReceive,
    as_connection_broken,
)

_AHEAD = 4  # operations for which receives are posted; a peer may be one operation ahead of this host
_MOMENT_S = 3e-3  # after this time, another thread waits for the message
_POLLS = 20  # polls of memory for a message, while the engine's thread reads it
_CROWDED_S = 1e-4  # a poll takes longer only if other threads want this CPU core
_NUM_UNPOLLED = 50  # after such a slow poll, this many messages are not polled
_WAIT_S = 1e-3  # the maximum wait for data, because data that arrive as a wait begins do not end it
_MARK = struct.Struct("<Q")
_FACTOR = 0x9E3779B97F4A7C15  # makes the mark from an operation's number; data are unlikely to contain the mark


class MessageBuffer:
    """A `MessageBuffer` is memory for one message."""

    def __init__(self, nbytes: int) -> None:
        nbytes += _MARK.size
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.address = self.tensor.data_ptr()
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.first_word = ctypes.c_uint32.from_address(self.address)
        self.pending: PendingMessage | None = None
        self._part, self._part_bytes = self.tensor, nbytes

    def message(self, nbytes: int, number: int) -> Tensor:
        """Return the message of operation `number` in the first `nbytes`; a long one gets a mark at its end."""
        if nbytes > WHOLE_BYTES:
            _MARK.pack_into(self.bytes, nbytes, _mark_of(number))
            nbytes += _MARK.size
        if self._part_bytes != nbytes:  # cached for the usual case of the same size as before
            self._part, self._part_bytes = self.tensor[:nbytes], nbytes
        return self._part

    def has_arrived(self, nbytes: int, number: int) -> bool:
        """Return whether the message of `nbytes`, which has begun to arrive, is complete, or will be at once."""
        # `nbytes` may be wrong while the beginning of the message is being written; a slice never exceeds the buffer.
        return nbytes <= WHOLE_BYTES or self.bytes[nbytes : nbytes + _MARK.size] == _MARK.pack(_mark_of(number))


def _mark_of(number: int) -> int:
    return (number + 1) * _FACTOR % 2**64


class Inboxes:
    """`Inboxes` receive one message from each sender in each operation. The first word of a message is never zero.

    Arguments:
        senders: the sending ranks, by keys of the caller's choice.
        nbytes: the maximum length of a message from each sender, by key.
        length: returns the length of the message from a sender (by key) that has begun to arrive in a buffer.
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
        self._num_unpolled = 0
        for slot in range(_AHEAD):
            self._post(slot)

    def post(self) -> None:
        """Post receives for a later operation, before this rank sends anything in the operation that begins.

        At this time no sender can have left. Posting a receive sends a message to the sender; the host of a sender that
        has left would answer with a TCP reset, and this host would then discard received data that it has not yet read.
        """
        if self._number:
            self._post((self._number - 1) % _AHEAD)

    def receive(self, key: int, deadline: Deadline) -> MessageBuffer:
        """Return this operation's message of a sender; it is valid until `done`.

        Raises:
            ConnectionBroken: the sender is lost or late.
        """
        inbox, peer = self._buffers[key][self._number % _AHEAD], self._senders[key]
        if self._engine.is_interruptible or self._arrives_soon(key, inbox):
            assert inbox.pending is not None
            try:
                inbox.pending.wait(timedelta_of(deadline))
            except RuntimeError as error:
                raise ConnectionBroken(peer, str(error)) from error
        else:
            self._await(inbox, peer, deadline)
        return inbox

    def _arrives_soon(self, key: int, inbox: MessageBuffer) -> bool:
        """Return whether the message arrives within a few milliseconds, so that the wait for it is short.

        If other threads get this CPU core meanwhile, they keep it for long, and a blocked thread would wake up sooner.
        The next messages are then not polled.
        """
        self._num_unpolled -= 1
        begin = before = time.perf_counter()
        while before - begin < _MOMENT_S:
            for _ in range(_POLLS):
                if inbox.first_word.value and inbox.has_arrived(self._length(key, inbox), self._number):
                    return True
                if self._num_unpolled > 0:
                    return False
                os.sched_yield()
                now = time.perf_counter()
                if now - before > _CROWDED_S:
                    self._num_unpolled = _NUM_UNPOLLED
                before = now
            self._engine.wait_for_data(_WAIT_S)
            before = time.perf_counter()
        return False

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
            if inbox.first_word.value:  # a sender may die in the middle of a message, which Gloo does not report
                try:
                    look()
                except ConnectionBroken:
                    self._background.over(arrived)
                    raise
        self._background.over(arrived)
        if error is not None:
            with as_connection_broken(peer):
                raise error

    def done(self) -> None:
        """Release the memory of this operation's messages for later operations."""
        self._number += 1

    def _post(self, slot: int) -> None:
        for key, peer in self._senders.items():
            inbox = self._buffers[key][slot]
            inbox.first_word.value = 0
            try:
                inbox.pending = self._engine.recv(peer, inbox.tensor, FINGERPRINT)
            except RuntimeError as error:  # the peer is lost: a wait reports that
                inbox.pending = RejectedReceive(error)

    def close(self) -> None:
        """Release the messages. Close the engine first: only that ends a receive to which no peer has sent."""
        self._background.close()
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.pending = None  # the engine's sockets live as long as a pending message
