"""A rank knows this of its group, and tells it in a report of a failure, whatever carries the group's operations."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx._comm.diagnostics.divergence import describe_left_alone
from phalanx._comm.diagnostics.failure_report import FailureReport, Operation, describe_interruption, ended_well
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import Position


class GroupReports(ABC):
    """It is one rank's side of a group, as far as a report needs it; `_names` are what people call the processes."""

    group: str
    rank: int
    world_size: int
    _names: Sequence[str]
    _seq: int
    _entered_s: float
    report: FailureReport | None = None  # why the group is over

    @property
    @abstractmethod
    def position(self) -> Position:
        """Return where this rank is."""

    def _where(self) -> Position:
        position = self.position
        return replace(position, seconds=time.monotonic() - self._entered_s) if position.inside else position

    @property
    def _others(self) -> list[int]:
        return [r for r in range(self.world_size) if r != self.rank]

    def _processes(self, *ranks: int) -> dict[int, str]:
        return {rank: self._names[rank] for rank in ranks}

    def _missing(self, answers: Mapping[int, Position]) -> list[int]:
        """Return the ranks that have not come as far as this one, or do not answer."""
        return [r for r in self._others if r not in answers or answers[r].seq < self._seq]

    def _report_lost(self, who: int, reason: str, peer: int | None, position: Position | None = None) -> FailureReport:
        """Report that `who` is gone, from `position` where that is known. `peer` is the rank whose message is waited
        for, any if below zero; None where a collective waits for all.
        """
        positions = {} if position is None else {who: position}
        remarks: tuple[str, ...] = ()
        if peer is None and position is not None and position.seq < self._seq and ended_well(reason):
            remarks = (describe_left_alone(self.position.operation, [self.rank], [who], {}),)
        return FailureReport("lost", (who,), self._processes(who), positions, reason=reason, remarks=remarks)

    def _report_interrupted(self, reason: str, position: Position) -> FailureReport:
        """Report what ended an operation of this rank, which is no failure of the group."""
        me = self.rank
        return FailureReport("interrupted", (me,), self._processes(me), {me: position}, reason=reason)


class StoreReports(GroupReports):
    """It is that of a group whose ranks tell each other in a `FailureStore` how they end and what has failed."""

    _failure_store: FailureStore
    _has_said = False  # whether it has said how this rank ends

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether this process has left."""

    @abstractmethod
    def _end(self) -> None:
        """Wake all that wait here or for this rank: the group is over."""

    def _publish_exit_reason(self, reason: str) -> None:
        """Write `reason` to the store before the connections close: a rank that loses one reads it; the first stays."""
        if self.report is None and not self._has_said and self.world_size > 1:
            self._has_said = True
            self._failure_store.leave_exit_reason(reason, self._where())

    def _linger(self) -> None:
        if self.report is not None:
            self._failure_store.linger(self.report)

    def _take_report(self, report: FailureReport | None) -> None:
        """Keep the report of a group that is over: the store may be gone when this rank comes to the next operation."""
        self.report = self.report or report
        if report is not None:
            self._failure_store.acknowledge()
        self._end()

    def _publish_report(self, report: FailureReport) -> None:
        """End the group with this report, unless another rank's is there already."""
        # The monitor may have read the report of another rank meanwhile: that rank may be gone by now, with the store,
        # for it was told that this one knows.
        self.report = self.report or self._failure_store.post(report)
        self._failure_store.acknowledge()
        self._end()

    def _give_up(self, error: BaseException, position: Position | None = None) -> None:
        """Tell the peers what ended the operation, since it is no failure of the group."""
        if not self.closed and self.report is None:
            self.report = self._failure_store.post(
                self._report_interrupted(type(error).__name__, position or self._where())
            )
            self._end()

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """End the operation and the group: a thread that waited was interrupted (Ctrl-C, a signal handler that raised).

        It tells the peers, and says in `error` what was waited for. `what` describes a message with `peer`; if it is
        empty, the operation is the collective. It takes a second at most, in which the others say where they are.
        """
        if self.closed or self.report is not None:
            return
        where = self._where()
        if what:
            missing, positions = [peer] if peer >= 0 else [], None
            where = replace(where, operation=what, inside=True)
        else:
            positions = self._failure_store.collect_positions()
            missing = self._missing(positions)
        self._give_up(error, where)
        if not error.args:
            operation = Operation(where.operation if where.inside else "no operation", self.group, self.rank)
            error.args = (describe_interruption(operation, error, self._processes(*missing), positions),)
