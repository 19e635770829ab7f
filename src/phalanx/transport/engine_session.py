"""An `EngineSession` surrounds each collective of a group over Gloo or MPI: it numbers it, agrees on it, and reports.

number    the ranks' next collective, and the line of the program where this rank calls it
agree     every rank's head goes to every rank; data may move if they are equal
report    what fails inside becomes the error that all ranks of the group tell
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from phalanx.deadline import Deadline
from phalanx.diagnostics.call_sites import short
from phalanx.diagnostics.failure_report import FailureReport, Operation, closed, late
from phalanx.diagnostics.flight_recorder import Position
from phalanx.transport.base import CallContext, Transport
from phalanx.transport.call import HEAD_BYTES, Call, Disagreement, disagreement, split_heads
from phalanx.transport.group_reports import GroupReports


class EngineSession(GroupReports, Transport):
    """An engine session is one rank's side of such a group. `names` are the ranks' processes: 'pid 17 on node3'.

    It runs one collective at a time: the caller of `_running` holds `lock`.
    """

    def __init__(self, group: str, rank: int, world_size: int, names: Sequence[str]) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.lock = threading.Lock()
        self._names = tuple(names)
        self._seq = 0
        self._sites: dict[str, int] = {"": 0}
        self._places = [""]  # by the number of the call site
        self._entered_s = 0.0
        self._at = Position()

    @property
    def _position(self) -> Position:
        return self._at

    @property
    def seq(self) -> int:
        return self._seq

    def call_site(self, place: tuple[str, int]) -> int:
        """Return a number for a (file, line)."""
        text = f"{short(place[0])}:{place[1]}" if place[0] else ""
        number = self._sites.get(text)
        if number is None:
            number = self._sites[text] = len(self._places)
            self._places.append(text)
        return number

    def _place(self, ctx: CallContext) -> str:
        return self._places[ctx.call_site]

    # -- around a collective -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self, call: Call, ctx: CallContext) -> Iterator[Deadline]:
        """Agree on `call` with all ranks, under `lock`. What fails inside becomes the error that all ranks raise.

        Raises:
            MismatchError: some rank called something else; no tensor was changed.
            PeerLostError, DeadlineError: a rank is gone or late.
        """
        with torch.no_grad():
            self._check_open(Operation(call.name, self.group, self.rank, call_site=call.place))
            self._seq += 1
            operation = Operation(f"{call.name} #{self._seq}", self.group, self.rank, self._seq, call.place)
            self._entered_s = time.monotonic()
            self._at = Position(self._seq, operation.place, inside=True)
            deadline = Deadline.after(ctx.timeout_s)
            with self._reporting(operation, deadline):
                self._agree(call, deadline)
                yield deadline
            self._at = Position(self._seq, operation.place)

    def _agree(self, call: Call, deadline: Deadline) -> None:
        if self.world_size == 1:
            return
        mine, heads = bytearray(call.head(self._seq)), bytearray(HEAD_BYTES * self.world_size)
        self._gather_heads(mine, heads, deadline)
        if calls := disagreement(split_heads(bytes(heads), range(self.world_size)), self._seq):
            raise Disagreement(calls)

    @abstractmethod
    def _gather_heads(self, mine: bytearray, heads: bytearray, deadline: Deadline) -> None:
        """Write every rank's `mine` to `heads`, one after the other."""

    @abstractmethod
    def _reporting(
        self, operation: Operation, deadline: Deadline, peer: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Turn what fails inside into the error that all ranks raise. `peer` is the rank that is waited for, any if
        below zero, all if None.
        """

    def _check_open(self, operation: Operation) -> None:
        if self.closed:
            raise closed(self.group)
        if self._report is not None:
            raise self._report.error(operation)

    def _check_tag(self, tag: int, num_tags: int) -> None:
        """Raise what is wrong before a message with `tag` is sent or received."""
        self._check_open(Operation("send and recv", self.group, self.rank))
        if not 0 <= tag < num_tags:
            raise ValueError(f"send and recv: tag must be in 0..{num_tags - 1}, got {tag}")

    # -- what reports tell ---------------------------------------------------------------------------------------

    def _report_late(self, answers: Mapping[int, Position], timeout_s: float, peer: int | None) -> FailureReport:
        """Report that this rank gave up. `answers` has where the others say they are; `peer` is as for `_reporting`."""
        if peer is None:
            missing = self._missing(answers)
        else:
            missing = [peer] if peer >= 0 else self._others
        return late(missing, self._names, answers, self.rank, timeout_s, is_collective=peer is None)
