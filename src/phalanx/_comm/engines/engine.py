"""An `Engine` sends messages between the ranks of a group, on any hosts."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from phalanx._base.deadline import Deadline

# Tags from here on, up to 31 bits, are for data inside collectives.
DATA = 0x40000000
# How long a leaving rank waits for its data to arrive: another rank may need them to complete an operation.
DELIVERY_S = 10.0
_LONG_WAIT_S = 20.0  # a longer wait is rounded to whole seconds, so that few timedelta objects are created
_LONGEST_WAIT_S = 1e8  # three years: an infinite timeout, as Gloo counts milliseconds
FOR_EVER = timedelta(seconds=_LONGEST_WAIT_S)


def timedelta_of(deadline: Deadline, least_s: float = 0.001) -> timedelta:
    """Return the time left until the deadline, for an engine's wait; at least `least_s`."""
    left_s = deadline.left_s
    if left_s > _LONG_WAIT_S:
        return _seconds(math.ceil(min(left_s, _LONGEST_WAIT_S)))
    return timedelta(seconds=max(left_s, least_s))


@lru_cache
def _seconds(number: int) -> timedelta:
    return timedelta(seconds=number)


class PendingMessage(Protocol):
    """An `PendingMessage` is a pending message."""

    def wait(self, timeout: timedelta, /) -> object:
        """Wait until the tensor may be used; raise RuntimeError if that is impossible."""


class PendingAnySourceReceive(PendingMessage, Protocol):
    """A `PendingAnySourceReceive` is a receive from any rank."""

    def _source_rank(self) -> int:  # torch's name
        """Return the rank that sent the message; it is known after the wait."""


class Engine(Protocol):
    """An `Engine` sends and receives for one rank. Messages between two ranks with one tag arrive in order of sending.

    Tensors are contiguous; a receive is at least as long as its message. The caller keeps a message's tensor alive.
    """

    @property
    def is_interruptible(self) -> bool:
        """Return whether Ctrl-C, and signal handlers that raise, interrupt a wait."""

    @property
    def num_tags(self) -> int:
        """Return the number of tags: the user's messages have tags below this."""

    def send(self, dst: int, tensor: Tensor, tag: int) -> PendingMessage:
        """Start a send."""

    def recv(self, src: int, tensor: Tensor, tag: int) -> PendingMessage:
        """Start a receive."""

    def recv_any(self, tensor: Tensor, tag: int) -> PendingAnySourceReceive:
        """Start a receive from the first rank that sends."""

    def wait_for_data(self, timeout_s: float) -> None:
        """Wait until data arrive at this rank, at most `timeout_s`; the wait may miss data that arrive as it begins."""

    def check(self, peer: int) -> None:
        """Raise RuntimeError if the connection with `peer` is known to be lost."""

    def deliver(self, deadline: Deadline) -> None:
        """Wait until all sent data have arrived, or the time is up. Called before `close`, if there was no failure."""

    def close(self) -> None:
        """Leave at once: a thread that waits for a message, here or (from this rank) at a peer, gets an error."""

    def free(self) -> None:
        """Release the engine's resources, after `close`, once no thread of this process calls the engine any more."""
