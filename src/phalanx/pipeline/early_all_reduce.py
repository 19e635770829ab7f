"""Sum a few numbers over all ranks at the end of each step, with messages whose receives are posted early.

The first stage usually finishes last. Only then could a Gloo all_reduce begin, in a thread that needs a core and
exchanges notices first. Here the other ranks' numbers have already arrived, and the first rank sends one message to
each of them.
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
"""How long an interrupted rank stays so that the others receive its message."""


def keep_messages(group: dist.ProcessGroup, messages: Sequence[tuple[dist.Work, Tensor]]) -> None:
    """Keep the memory of messages in flight as long as the group: Gloo fails when a message's memory is freed."""
    _kept.setdefault(group, []).extend(messages)


def reduces_early(group: dist.ProcessGroup) -> bool:
    """Return whether an `EarlyAllReduce` pays off: with Gloo only, as the backend `phalanx` is as fast without it."""
    return phalanx_group(group) is None and dist.get_backend(group) == "gloo"


class EarlyAllReduce:
    """An `EarlyAllReduce` posts its receives when a step begins. In each step every rank calls `add` or `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._others = range(1, group.size()) if group.rank() == 0 else range(1)
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._error: RuntimeError | None = None
        """The error of a rank whose connection had ended before the step began."""
        self.lost: int | None = None
        """The first rank that was found to be lost."""

    def begin(self, count: int) -> None:
        """Begin a step, at whose end `count` numbers are added.

        If a rank is already lost, only `add` raises: the other ranks need this rank's messages until then, and the
        neighbours of the lost rank detect the loss themselves.
        """
        for other in self._others:
            numbers = torch.empty(count, dtype=torch.float64, device="cpu")
            try:
                self._posted.append((self._group.recv([numbers], other, self._tag), numbers))
            except RuntimeError as error:
                self._error = self._error or self._error_of(other, error)

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by the sum over all ranks, in the order of ranks.

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
        """Contribute these numbers and leave; wait up to `stay_s` for the others, in case this process then ends."""
        deadline = Deadline.after(stay_s)
        if not self._posted:  # the sum is complete; in the next step the others would wait for their sends
            self.begin(len(numbers))
        self._send(numbers)  # to every rank that is reachable
        for work, _ in self._posted if stay_s else ():
            with contextlib.suppress(RuntimeError):  # this rank is lost or late; others may still send
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        keep_messages(self._group, [*self._posted, *self._sent])
        self._posted, self._sent = [], []

    def _send(self, numbers: Tensor) -> RuntimeError | None:
        """Send to all ranks, also after a lost one; return the first error."""
        first = None
        for other in self._others:
            copied = numbers.clone()
            try:
                self._sent.append((self._group.send([copied], other, self._tag), copied))
            except RuntimeError as error:
                first = first or self._error_of(other, error)
        return first

    def _error_of(self, other: int, error: RuntimeError) -> RuntimeError:
        """Add to the error the rank whose connection failed, and return the error."""
        self.lost = other if self.lost is None else self.lost
        with_note(error, f"That is the connection to rank {other}.")
        return error
