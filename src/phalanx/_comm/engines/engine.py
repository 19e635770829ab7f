"""`Engine` is the send and receive interface that Gloo and MPI implement to carry a group's messages between hosts."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from phalanx._base.deadline import Deadline

# Tags from this value up to 31 bits are for the data of collectives.
DATA = 0x40000000
# How long a leaving rank waits until its peers have received its data: they may need the data to complete an operation.
DELIVERY_S = 10.0
_LONG_WAIT_S = 20.0  # a longer wait is rounded up to whole seconds, so that few timedelta objects are created
_LONGEST_WAIT_S = 1e8  # three years: used for an infinite timeout, as Gloo needs a finite number of milliseconds
FOR_EVER = timedelta(seconds=_LONGEST_WAIT_S)


def timedelta_of(deadline: Deadline, least_s: float = 0.001) -> timedelta:
    """Return the time left until the deadline, at least `least_s`, as the timeout of an engine's wait."""
    left_s = deadline.left_s
    if left_s > _LONG_WAIT_S:
        return _seconds(math.ceil(min(left_s, _LONGEST_WAIT_S)))
    return timedelta(seconds=max(left_s, least_s))


@lru_cache
def _seconds(number: int) -> timedelta:
    return timedelta(seconds=number)


class PendingMessage(Protocol):
    """A `PendingMessage` is a send or receive that has been started."""

    def wait(self, timeout: timedelta, /) -> object:
        """Wait until the tensor may be used; raise RuntimeError if the message fails or the wait times out."""


class PendingAnySourceReceive(PendingMessage, Protocol):
    """A `PendingAnySourceReceive` is a receive from any rank that has been started."""

    def _source_rank(self) -> int:  # torch's name
        """Return the rank that sent the message; valid only after the wait."""


class ShortMessages(Protocol):
    """`ShortMessages` are a second way to send, for messages that are short and frequent.

    Messages from one rank to another arrive in order. One thread at a time uses them.
    """

    def send(self, peer: int, message: memoryview) -> None:
        """Start a send, after which the memory of `message` may be reused; raise RuntimeError if the peer is lost."""

    def receive(self, peer: int, buffer: memoryview, deadline: Deadline) -> object:
        """Receive the next message into `buffer`; raise RuntimeError if the peer is lost, or late."""

    def flush(self, deadline: Deadline) -> None:
        """Wait until no sent message needs this process any longer; raise RuntimeError as `receive` does."""


class Engine(Protocol):
    """An `Engine` sends and receives for one rank. Between two ranks, messages with the same tag arrive in order.

    Tensors are contiguous, and a receive's tensor is at least as long as the message. The caller keeps the tensor of a
    pending message alive.
    """

    @property
    def is_interruptible(self) -> bool:
        """Return whether Ctrl-C, or a signal handler that raises, interrupts a wait."""

    @property
    def short_messages(self) -> ShortMessages:
        """Return the second way to send; Ctrl-C, or a signal handler that raises, interrupts its waits."""

    @property
    def num_tags(self) -> int:
        """Return the number of tags for the user's messages, whose tags must be below this number."""

    def send(self, dst: int, tensor: Tensor, tag: int) -> PendingMessage:
        """Start a send."""

    def recv(self, src: int, tensor: Tensor, tag: int) -> PendingMessage:
        """Start a receive."""

    def recv_any(self, tensor: Tensor, tag: int) -> PendingAnySourceReceive:
        """Start a receive from the first rank that sends."""

    def check(self, peer: int) -> None:
        """Raise RuntimeError if the connection to `peer` is known to be lost."""

    def deliver(self, deadline: Deadline) -> None:
        """Wait until all sent data have arrived or the deadline has passed; called before `close` if nothing failed."""

    def close(self) -> None:
        """Leave at once: pending waits in this process, and peers' waits for messages from this rank, fail."""

    def free(self) -> None:
        """Release the engine's resources; call this after `close`, when no thread uses the engine any longer."""
