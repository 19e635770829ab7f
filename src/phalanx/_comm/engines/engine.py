"""Every engine offers messages between the ranks of a group, wherever they run."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch import Tensor

from phalanx._base.deadline import Deadline

# Tags from here on, up to 31 bits, are those of what travels inside collectives.
DATA = 0x40000000
# A rank that leaves waits so long for what it has sent to arrive: another may need it to finish what is finished here.
DELIVERY_S = 10.0


class InTransit(Protocol):
    """It is a message on its way."""

    def wait(self, timeout: timedelta, /) -> object:
        """Wait until the tensor may be used; raise RuntimeError if that will not happen."""


class FromAnybody(InTransit, Protocol):
    """It is a receive that takes whatever comes first."""

    def _source_rank(self) -> int:  # torch's name
        """Return the rank that sent it; it is known after the wait."""


class Engine(Protocol):
    """It is one rank's end. Messages between two ranks with one tag arrive in the order in which they were sent.

    Tensors are contiguous; a receive is as long as its message, or longer. The caller keeps a message's tensor.
    """

    @property
    def is_interruptible(self) -> bool:
        """Return whether a wait is interrupted by Ctrl-C, and by signal handlers that raise."""

    @property
    def num_tags(self) -> int:
        """Return the number of tags: the user's messages have tags below this."""

    def send(self, dst: int, tensor: Tensor, tag: int) -> InTransit:
        """Start to send."""

    def recv(self, src: int, tensor: Tensor, tag: int) -> InTransit:
        """Start to receive."""

    def recv_any(self, tensor: Tensor, tag: int) -> FromAnybody:
        """Start to receive from the first rank that sends."""

    def check(self, peer: int) -> None:
        """Raise RuntimeError if the connection with `peer` is gone, as far as is known."""

    def deliver(self, deadline: Deadline) -> None:
        """Wait before `close`, if nothing went wrong, until what was sent has arrived, or time is up."""

    def close(self) -> None:
        """Leave at once: a thread that waits for a message, here or (from this rank) at a peer, gets an error."""

    def free(self) -> None:
        """Let go of what the engine holds, after `close`, when nothing here calls it any more."""
