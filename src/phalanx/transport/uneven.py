"""Let training steps go on without the ranks that have run out of data, and bring these up to date on their return.

A rank that waits at a collective which is not part of a step, or has left in order, is out of the steps that the others
make meanwhile. The protocol and its proof are in csrc/uneven.h; Python does two things for it: it says which calls
are part of a step, and brings all ranks up to date before the collective at which they meet again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.core_numbers import WAITS
from phalanx.transport.base import CallContext


class RejoinChannel:
    """A `RejoinChannel` carries collectives of the ranks that meet again, in the middle of the collective at which they
    do.

    They go straight to the memory: the group's queue may be busy with that very collective.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def _call_context(self) -> CallContext:
        return CallContext(self._group._timeout_s, self._group.transport.call_site(("", 0)))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor` on every rank with that of rank `src`."""
        self._group.transport.broadcast(tensor, src, self._call_context())

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row of whole numbers; all rows have one length."""
        mine = torch.tensor(list(row), dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.transport.gather(rows, mine, self._call_context())
        return [one.tolist() for one in rows]


class Participant(Protocol):
    """A participant makes training steps over a group."""

    @property
    def in_round(self) -> bool:
        """Return whether this rank has given some gradients of a step, and not yet got all of the mean."""

    def rejoin(self, rejoin_channel: RejoinChannel) -> None:
        """Bring ranks up to date that were out of steps, now that all ranks are here. All ranks call it."""


class UnevenInputs:
    """`UnevenInputs` belongs to one group that shares memory; it knows the participants and which calls are part of a
    step.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        # they are in the order of construction, which is the same on all ranks
        self._participants: list[weakref.ref[Participant]] = []
        self.role = WAITS
        self.apart = False
        """Whether some rank was out of a step of this rank's since all met, and nobody has been brought up to date."""

    def add(self, participant: Participant) -> None:
        """Add a participant; all ranks add theirs in the same order."""
        self._participants.append(weakref.ref(participant))

    def rejoin(self) -> None:
        """Bring all participants up to date that every rank still has. All ranks call it."""
        alive = [participant() for participant in self._participants]
        if alive:
            self._rejoin(alive)
        self.apart = False

    def _rejoin(self, alive: Sequence[Participant | None]) -> None:
        group = self._group()
        assert group is not None  # it is in a collective
        rejoin_channel = RejoinChannel(group)
        kept = rejoin_channel.gather([one is not None for one in alive])
        for number, participant in enumerate(alive):
            if participant is not None and all(row[number] for row in kept):
                participant.rejoin(rejoin_channel)

    def leave(self) -> None:
        """Leave the group: if this rank has finished what it began, and fails at nothing, others may train on."""
        participants = (participant() for participant in self._participants)
        in_round = any(one is not None and one.in_round for one in participants)
        group = self._group()
        if group is not None and sys.exc_info()[0] is None and not in_round:
            group.symm_mem.core.leave_in_order()
