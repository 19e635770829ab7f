"""A small sum over all ranks at the end of each step, by messages whose receives were posted before.

The last to be done is mostly the first stage. Over Gloo an all_reduce begins then, in a thread of its own that must get
a core and exchanges notices first; here the others' numbers have come already, and one message goes to each.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.deadline import Deadline

_outliving: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[dist.Work, Tensor]]] = weakref.WeakKeyDictionary()


FAREWELL_S = 5.0
"""How long a rank that was interrupted stays for the others to hear of it."""


def outlive(group: dist.ProcessGroup, posted: Sequence[tuple[dist.Work, Tensor]]) -> None:
    """Keep what is on the way as long as the group: Gloo takes no message any more once the memory of one is gone."""
    _outliving.setdefault(group, []).extend(posted)


def meets_by_messages(group: dist.ProcessGroup) -> bool:
    """Whether it is worth it: the backend `phalanx` has collectives that are as fast, and tell more of failures."""
    return not isinstance(group, PhalanxProcessGroup) and dist.get_backend(group) == "gloo"


class Meeting:
    """Of the ranks of a group, at its first. In each step that has begun every rank calls `add` or `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._others = range(1, group.size()) if group.rank() == 0 else range(1)
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def begin(self, count: int) -> None:
        """A step begins, at whose end so many numbers are added."""
        for other in self._others:
            numbers = torch.empty(count, dtype=torch.float64)
            self._posted.append((self._group.recv([numbers], other, self._tag), numbers))

    def add(self, numbers: Tensor) -> None:
        """`numbers` become the sum of all ranks', in the order of ranks.

        Raises:
            RuntimeError: a rank is gone. Where it is another than the first, that one tells the rest with `leave`.
        """
        if self._group.rank():
            self._send(numbers)
        for work, come in self._posted:
            work.wait()
            numbers.copy_(come) if self._group.rank() else numbers.add_(come)
        self._posted.clear()
        if self._group.rank() == 0:
            self._send(numbers)
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def leave(self, numbers: Tensor, *, stay_s: float) -> None:
        """Be counted with these; stay until all have come, or so long, in case this process ends with it."""
        deadline = Deadline.after(stay_s)
        with contextlib.suppress(RuntimeError):  # a peer is gone, which the others see
            self._send(numbers)
            for work, _ in self._posted if stay_s else ():
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        outlive(self._group, [*self._posted, *self._sent])
        self._posted, self._sent = [], []

    def _send(self, numbers: Tensor) -> None:
        for other in self._others:
            copied = numbers.clone()
            self._sent.append((self._group.send([copied], other, self._tag), copied))
