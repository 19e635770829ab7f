"""Sum a few numbers over all ranks at the end of each step, with messages whose receives are posted early.

The first stage usually finishes last. A Gloo all_reduce could start only then, on a thread that needs a core and
exchanges notifications first. Here, the other ranks' numbers have already arrived by then, and the first rank only has
to send one message to each of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx.pipeline.failure import with_note

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[dist.Work, Tensor]]] = weakref.WeakKeyDictionary()


LEAVING_S = 5.0
"""How long an interrupted rank waits for the others to receive its last message, in seconds."""


def keep_messages(group: dist.ProcessGroup, messages: Sequence[tuple[dist.Work, Tensor]]) -> None:
    """Keep the memory of messages in flight as long as the group: Gloo fails when a message's memory is freed."""
    _kept.setdefault(group, []).extend(messages)


def reduces_early(group: dist.ProcessGroup) -> bool:
    """Return whether an `EarlyAllReduce` pays off: only with Gloo, as the backend `phalanx` is as fast without it."""
    return phalanx_group(group) is None and dist.get_backend(group) == "gloo"


class EarlyAllReduce:
    """An `EarlyAllReduce` is one sum per step, with receives posted in `begin`; every rank calls `add` or `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._others = range(1, group.size()) if group.rank() == 0 else range(1)
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._error: RuntimeError | None = None
        """The error of a connection that had failed before the step began."""
        self.lost: int | None = None
        """The first rank that was found to be lost."""

    def begin(self, count: int) -> None:
        """Begin a step that ends with a sum of `count` numbers.

        If a rank is already lost, the error is left to `add`: the other ranks need this rank's messages until then, and
        the neighbours of the lost rank detect the loss themselves.
        """
        for other in self._others:
            numbers = torch.empty(count, dtype=torch.float64, device="cpu")
            try:
                self._posted.append((self._group.recv([numbers], other, self._tag), numbers))
            except RuntimeError as error:
                self._error = self._error or self._error_of(other, error)

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by the sum over all ranks, added in rank order.

        Raises:
            RuntimeError: a rank is lost. Rank 0, unless it is the lost rank, notifies the other ranks with `leave`. If
                the lost rank had sent its numbers, the others may have received the sum; they detect the loss in the
                next step.
        """
        if self._error is not None:
            raise self._error
        if self._group.rank() and (unsent := self._send(numbers)):
            raise unsent
        for other, (work, received) in zip(self._others, self._posted, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._error_of(other, error) from error.__cause__
            numbers.copy_(received) if self._group.rank() else numbers.add_(received)
        self._posted.clear()
        if self._group.rank() == 0 and (unsent := self._send(numbers)):
            raise unsent
        for other, (work, _) in zip(self._others, self._sent, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._error_of(other, error) from error.__cause__
        self._sent.clear()

    def leave(self, numbers: Tensor, *, stay_s: float) -> None:
        """Send `numbers`, wait up to `stay_s` for those of the others, in case this process then ends, and leave."""
        deadline = Deadline.after(stay_s)
        if not self._posted:  # the sum is complete; without receives, the others' next sends would block
            self.begin(len(numbers))
        self._send(numbers)  # to every rank that is reachable
        for work, _ in self._posted if stay_s else ():
            with contextlib.suppress(RuntimeError):  # that rank is lost or late; others may still send
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        keep_messages(self._group, [*self._posted, *self._sent])
        self._posted, self._sent = [], []

    def _send(self, numbers: Tensor) -> RuntimeError | None:
        """Send to all ranks, even if an earlier one is lost; return the first error."""
        first = None
        for other in self._others:
            copied = numbers.clone()
            try:
                self._sent.append((self._group.send([copied], other, self._tag), copied))
            except RuntimeError as error:
                first = first or self._error_of(other, error)
        return first

    def _error_of(self, other: int, error: RuntimeError) -> RuntimeError:
        """Add the rank whose connection failed to the error, and return the error."""
        self.lost = other if self.lost is None else self.lost
        with_note(error, f"This error is on the connection to rank {other}.")
        return error
