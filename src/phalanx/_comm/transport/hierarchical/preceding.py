"""Send messages that arrive on other hosts before the next collective ends on any rank.

    rank b ──message──▶ rank a        then both join the collective

No rank can complete the collective without a's part, and a joins only when b's message has arrived. So no rank waits
for an acknowledgement, and the message is sent while b computes its input to the collective.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import Engine, PendingMessage
from phalanx._comm.transport.background import WHOLE_BYTES, Background, look_at
from phalanx._comm.transport.hierarchical.rails import (
    ConnectionBroken,
    RailMessage,
    as_connection_broken,
)

# The tag of a group's first `PrecedingMessages`; each further one has the next lower tag. Collectives' data have lower
# tags than all of these.
_FIRST_TAG, _NUM_TAGS = 0x7FFFFFFD, 64
_AHEAD = 2  # posted receives per sender: Gloo sends only after the receiver has posted its receive
_SENT = 2
_PREFIX_BYTES = 64  # the first word is the message's length, including this prefix

Action = Callable[[Deadline], None]


class PrecedingMessages:
    """`PrecedingMessages` sends and receives these messages on one rank. Each `send` needs a `receive` per receiver."""

    def __init__(self, engine: Engine, tag: int, max_bytes: int, senders: Sequence[int]) -> None:
        self._engine = engine
        self._tag = tag
        self._background = Background()
        self._outboxes = [_Box(max_bytes) for _ in range(_SENT)]
        self._underway: list[list[tuple[int, PendingMessage]]] = [[] for _ in self._outboxes]
        self._number = 0
        self._inboxes = {peer: deque(_Box(max_bytes) for _ in range(_AHEAD)) for peer in senders}
        for peer, boxes in self._inboxes.items():
            for box in boxes:
                self._post(peer, box)

    def outbox(self, deadline: Deadline) -> Tensor:
        """Return the memory for the next message, once the message before the previous one has been sent from it."""
        slot = self._number % _SENT
        underway, self._underway[slot] = self._underway[slot], []
        for peer, pending in underway:
            self._wait(peer, pending, deadline, is_soon=True)
        return self._outboxes[slot].payload

    def send(self, receivers: Sequence[int], nbytes: int) -> None:
        """Start to send the first `nbytes` of the outbox.

        Raises:
            ConnectionBroken: a receiver is lost.
        """
        slot = self._number % _SENT
        box = self._outboxes[slot]
        box.length.value = _PREFIX_BYTES + nbytes
        for peer in receivers:
            with as_connection_broken(peer):
                pending = self._engine.send(peer, box.memory[: _PREFIX_BYTES + nbytes], self._tag)
            self._underway[slot].append((peer, pending))
        self._number += 1

    def receive(self, peer: int, deadline: Deadline) -> Tensor:
        """Return the next message of `peer`; it is valid until `done`.

        Raises:
            ConnectionBroken: the peer is lost or late.
        """
        box = self._inboxes[peer][0]
        assert box.pending is not None
        begun = box.length.value
        self._wait(peer, box.pending, deadline, is_soon=0 < begun <= WHOLE_BYTES)
        return box.payload[: box.length.value - _PREFIX_BYTES]

    def done(self, peer: int) -> None:
        """Release the memory of the last message from `peer` for a later one."""
        boxes = self._inboxes[peer]
        boxes.rotate(-1)
        self._post(peer, boxes[-1])

    def close(self) -> None:
        """Release the messages, after the engine is closed: its sockets live as long as a pending message."""
        self._background.close()
        for boxes in self._inboxes.values():
            for box in boxes:
                box.pending = None
        self._underway = [[] for _ in self._outboxes]

    def _post(self, peer: int, box: _Box) -> None:
        box.length.value = 0
        try:
            box.pending = self._engine.recv(peer, box.memory, self._tag)
        except RuntimeError as error:  # the peer has left, which matters only if it had another message to send
            box.pending = _RejectedReceive(error)

    def _wait(self, peer: int, pending: PendingMessage, deadline: Deadline, *, is_soon: bool) -> None:
        """Wait on this thread if the message `is_soon` complete or the engine handles signals, else on another one."""
        message = RailMessage(pending, peer, deadline)
        if is_soon or self._engine.is_interruptible:
            message.wait()
        else:
            self._background.run(message.wait, look_at(self._engine, peer, partial(ConnectionBroken, peer)))


class _RejectedReceive:
    """A `_RejectedReceive` stands in for a receive that the engine rejected; `wait` raises the engine's error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        """Raise the engine's error."""
        raise self._error


class _Box:
    """A `_Box` is memory for one message."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(_PREFIX_BYTES + nbytes, dtype=torch.uint8, device="cpu")
        self.payload = self.memory[_PREFIX_BYTES:]
        self.length = ctypes.c_uint64.from_address(self.memory.data_ptr())
        self.pending: PendingMessage | None = None


class Preceding:
    """`Preceding` has the action that a group runs before its next collective, and the group's `PrecedingMessages`."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self._opened: list[PrecedingMessages] = []

    def open(self, engine: Engine, max_bytes: int, senders: Sequence[int]) -> PrecedingMessages:
        """Return this rank's end of messages of at most `max_bytes` from `senders`. All ranks call this together."""
        if len(self._opened) == _NUM_TAGS:
            raise ValueError(f"a group has at most {_NUM_TAGS} kinds of messages that precede its collectives")
        self._opened.append(PrecedingMessages(engine, _FIRST_TAG - len(self._opened), max_bytes, senders))
        return self._opened[-1]

    def carry_out(self, deadline: Deadline) -> None:
        """Run the action, if there is one, before the collective that has begun."""
        action, self.action = self.action, None
        if action is not None:
            action(deadline)

    def close(self) -> None:
        """Release all messages, after the engine is closed."""
        self.action = None
        for one in self._opened:
            one.close()
