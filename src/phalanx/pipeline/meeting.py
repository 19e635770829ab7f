"""Sum a few numbers over all ranks at the end of each step, with messages whose receives are posted early.

The first stage usually finishes last. A Gloo all_reduce would begin then, in a thread that first needs a core and
exchanges notices; here the others' numbers have arrived already, and one message is sent to each.
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

_outliving: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[dist.Work, Tensor]]] = weakref.WeakKeyDictionary()


FAREWELL_S = 5.0
"""How long an interrupted rank stays so that the others receive its message."""


def outlive(group: dist.ProcessGroup, posted: Sequence[tuple[dist.Work, Tensor]]) -> None:
    """Keep memory of messages in flight as long as the group: Gloo fails once one message's memory is freed."""
    _outliving.setdefault(group, []).extend(posted)


def meets_by_messages(group: dist.ProcessGroup) -> bool:
    """Return whether messages pay off: the backend `phalanx` has equally fast collectives with better error reports."""
    return phalanx_group(group) is None and dist.get_backend(group) == "gloo"


class Meeting:
    """A `Meeting` belongs to the ranks of a group. In each step that has begun every rank calls `add` or `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._others = range(1, group.size()) if group.rank() == 0 else range(1)
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._gone: RuntimeError | None = None
        """The error of a rank whose connection had ended before the step began."""
        self.lost: int | None = None
        """The first rank that was found to be lost."""

    def begin(self, count: int) -> None:
        """Begin a step, at whose end `count` numbers are added.

        A lost rank is reported there: other ranks count on this one until then, and its neighbours detect it
        themselves.
        """
        for other in self._others:
            numbers = torch.empty(count, dtype=torch.float64)
            try:
                self._posted.append((self._group.recv([numbers], other, self._tag), numbers))
            except RuntimeError as error:
                self._gone = self._gone or self._of(other, error)

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by the sum over all ranks, in the order of ranks.

        Raises:
            RuntimeError: a rank is lost. Unless it is the first, the first notifies the rest with `leave`. If it was
                lost after it had sent its numbers, the rest may have received the sum, and learn of the loss in the
                next step.
        """
        if self._gone is not None:
            raise self._gone
        if self._group.rank() and (unsent := self._send(numbers)):
            raise unsent
        for other, (work, come) in zip(self._others, self._posted, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._of(other, error) from error.__cause__
            numbers.copy_(come) if self._group.rank() else numbers.add_(come)
        self._posted.clear()
        if self._group.rank() == 0 and (unsent := self._send(numbers)):
            raise unsent
        for other, (work, _) in zip(self._others, self._sent, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._of(other, error) from error.__cause__
        self._sent.clear()

    def leave(self, numbers: Tensor, *, stay_s: float) -> None:
        """Contribute these numbers and leave; wait up to `stay_s` for the others, in case this process then ends."""
        deadline = Deadline.after(stay_s)
        if not self._posted:  # this meeting is over; in the next, the others' numbers must be received, or they wait
            self.begin(len(numbers))
        self._send(numbers)  # to every rank that is reachable
        for work, _ in self._posted if stay_s else ():
            with contextlib.suppress(RuntimeError):  # this rank is lost or late; others may still send
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        outlive(self._group, [*self._posted, *self._sent])
        self._posted, self._sent = [], []

    def _send(self, numbers: Tensor) -> RuntimeError | None:
        """Send to all ranks, also after a lost one; return the first error."""
        first = None
        for other in self._others:
            copied = numbers.clone()
            try:
                self._sent.append((self._group.send([copied], other, self._tag), copied))
            except RuntimeError as error:
                first = first or self._of(other, error)
        return first

    def _of(self, other: int, error: RuntimeError) -> RuntimeError:
        """Return the error, with the rank whose connection failed."""
        self.lost = other if self.lost is None else self.lost
        with_note(error, f"That is the connection to rank {other}.")
        return error
