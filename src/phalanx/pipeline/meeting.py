"""Add up a small number over all ranks at the end of each step, with messages whose receives were posted before.

The first stage is mostly the last one to finish. Over Gloo an all_reduce begins then, in a thread of its own that must
get a core and exchanges notices first; here the others' numbers have come already, and one message goes to each.
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
"""How long a rank that was interrupted stays for the others to hear of it."""


def outlive(group: dist.ProcessGroup, posted: Sequence[tuple[dist.Work, Tensor]]) -> None:
    """Keep what is on the way as long as the group: Gloo takes no message any more once the memory of one is gone."""
    _outliving.setdefault(group, []).extend(posted)


def meets_by_messages(group: dist.ProcessGroup) -> bool:
    """Return whether messages pay: the backend `phalanx` has collectives as fast, which tell more of failures."""
    return phalanx_group(group) is None and dist.get_backend(group) == "gloo"


class Meeting:
    """A meeting belongs to the ranks of a group. In each step that has begun every rank calls `add` or `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._others = range(1, group.size()) if group.rank() == 0 else range(1)
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._gone: RuntimeError | None = None
        """The error that was raised for a rank whose connection had ended before the step began."""
        self.lost: int | None = None
        """The rank that was found to be gone first."""

    def begin(self, count: int) -> None:
        """Begin a step, at whose end so many numbers are added. That a rank is gone is raised there: other ranks count
        on this one until then, and its neighbours find out by themselves.
        """
        for other in self._others:
            numbers = torch.empty(count, dtype=torch.float64)
            try:
                self._posted.append((self._group.recv([numbers], other, self._tag), numbers))
            except RuntimeError as error:
                self._gone = self._gone or self._of(other, error)

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by the sum of all ranks', in the order of ranks.

        Raises:
            RuntimeError: a rank is gone. If it is another than the first, the first tells the rest with `leave`. If
                it was lost after it had sent its numbers, the rest may have got the sum, and hear of it in their next.
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
        """Be counted with these numbers; stay until all have come, or so long, in case this process ends with it."""
        deadline = Deadline.after(stay_s)
        if not self._posted:  # this one is over; in the next, the others' numbers want to be taken, or they stay
            self.begin(len(numbers))
        self._send(numbers)  # to whom it can be sent
        for work, _ in self._posted if stay_s else ():
            with contextlib.suppress(RuntimeError):  # this one is gone, or late; others may still come
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        outlive(self._group, [*self._posted, *self._sent])
        self._posted, self._sent = [], []

    def _send(self, numbers: Tensor) -> RuntimeError | None:
        """Send to all ranks, also to those after one that is gone; return the first error."""
        first = None
        for other in self._others:
            copied = numbers.clone()
            try:
                self._sent.append((self._group.send([copied], other, self._tag), copied))
            except RuntimeError as error:
                first = first or self._of(other, error)
        return first

    def _of(self, other: int, error: RuntimeError) -> RuntimeError:
        """Return the error, with the rank whose connection it is about."""
        self.lost = other if self.lost is None else self.lost
        with_note(error, f"That is the connection to rank {other}.")
        return error
