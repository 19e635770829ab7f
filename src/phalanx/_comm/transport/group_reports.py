"""Report the failures of a group through the job's store: ranks publish how they end and which operations failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import CHECK_S
from phalanx._comm.diagnostics.divergence import describe_left_alone
from phalanx._comm.diagnostics.failure_report import (
    FailedOperation,
    FailureReport,
    describe_interruption,
    ended_normally,
    occupied,
)
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.engines.engine import Engine
from phalanx._comm.transport.call import CollectiveCall


class ReportingRank(Protocol):
    """A `ReportingRank` is one rank's side of a group, as far as reports need it."""

    group: str
    rank: int
    world_size: int
    lock: threading.Lock  # held while a thread runs one of the group's collectives

    @property
    def names(self) -> Sequence[str]:
        """Return a description of each rank's process for users: 'pid 17 on node3'."""

    @property
    def seq(self) -> int:
        """Return the number of collectives that this rank has begun."""

    @property
    def entered_s(self) -> float:
        """Return when the last collective began, by `time.monotonic`."""

    @property
    def position(self) -> RankPosition:
        """Return this rank's position in the sequence of collectives."""

    @property
    def closed(self) -> bool:
        """Return whether this process has left."""

    def end(self) -> None:
        """Wake all threads that wait here, and all ranks that wait for this one: the group has failed."""


class GroupReports:
    """`GroupReports` publish the reports of rank `here` in a `FailureStore`, and read the other ranks' reports.

    `report` is the group's failure, or None while the group can be used. The first report of the group is kept.
    """

    store: FailureStore

    def __init__(self, here: ReportingRank) -> None:
        self.here = here
        self.report: FailureReport | None = None
        self._has_published_exit = False

    def attach(self, store: FailureStore) -> None:
        """Set the store. Call this before the first operation."""
        self.store = store

    # -- around a collective -------------------------------------------------------------------------------------

    def acquire_lock(self, call: CollectiveCall, timeout_s: float) -> None:
        """Acquire the group's lock for `call`; if the group fails meanwhile, raise, even if the owner stays blocked.

        Raises:
            PhalanxError: the group's failure.
            DeadlineError: the other thread's collective did not end in time.
        """
        here = self.here
        if here.lock.acquire(blocking=False):
            return
        deadline = Deadline.after(timeout_s)
        while True:
            self.check(FailedOperation(call.name, here.group, here.rank, call_site=call.place))
            if here.lock.acquire(timeout=min(deadline.left_s, CHECK_S)):
                return
            if deadline.passed:
                raise occupied(here.group, here.rank, timeout_s)

    def check(self, operation: FailedOperation) -> None:
        """Raise the group's failure, if there is one, as the error of `operation`."""
        if self.report is not None:
            raise self.report.error(operation)

    def fail(self, operation: FailedOperation, explain: Callable[[], FailureReport]) -> NoReturn:
        """End the group, and raise its failure as the error of `operation`.

        The failure is the first that any rank has published; if there is none, this rank publishes the result of
        `explain`.
        """
        self.publish(self.report or self.store.report() or explain())
        assert self.report is not None
        raise self.report.error(operation) from None

    def watch_peers(
        self, engine: Engine, peers: Iterable[int], lost: Callable[[int, RuntimeError], None]
    ) -> Callable[[], None]:
        """Return a `look` for `Background.run` in a collective, which calls `lost` when a connection is lost.

        `look` ignores peers that have left after they completed their part of the collective.
        """
        connected = set(peers)

        def look() -> None:
            for peer in sorted(connected):
                try:
                    engine.check(peer)
                except RuntimeError as error:
                    _, position = self.store.exit_reason(peer)
                    if position is None or position.inside or position.seq < self.here.seq:
                        lost(peer, error)
                    connected.discard(peer)

        return look

    # -- this rank's knowledge -----------------------------------------------------------------------------------

    def where(self) -> RankPosition:
        """Return the position of this rank, with the seconds since its operation began."""
        position = self.here.position
        return replace(position, seconds=time.monotonic() - self.here.entered_s) if position.inside else position

    def others(self) -> list[int]:
        """Return all ranks but this one."""
        return [r for r in range(self.here.world_size) if r != self.here.rank]

    def processes(self, *ranks: int) -> dict[int, str]:
        """Return descriptions of the processes of `ranks`."""
        return {rank: self.here.names[rank] for rank in ranks}

    def missing(self, answers: Mapping[int, RankPosition]) -> list[int]:
        """Return the ranks that have not reached this rank's operation, or do not answer."""
        return [r for r in self.others() if r not in answers or answers[r].seq < self.here.seq]

    def report_lost(
        self, who: int, reason: str, peer: int | None, position: RankPosition | None = None
    ) -> FailureReport:
        """Return the report that `who` is lost, at `position` if known.

        `peer` is the rank for whose message this rank waits (any rank if negative); None in a collective.
        """
        positions = {} if position is None else {who: position}
        remarks: tuple[str, ...] = ()
        if peer is None and position is not None and position.seq < self.here.seq and ended_normally(reason):
            remarks = (describe_left_alone(self.here.position.operation, [self.here.rank], [who], {}),)
        return FailureReport("lost", (who,), self.processes(who), positions, reason=reason, remarks=remarks)

    def _report_interrupted(self, reason: str, position: RankPosition) -> FailureReport:
        """Return the report of an error that ended this rank's operation, but is not a failure of the group."""
        me = self.here.rank
        return FailureReport("interrupted", (me,), self.processes(me), {me: position}, reason=reason)

    # -- communication between ranks -----------------------------------------------------------------------------

    def publish_exit_reason(self, reason: str) -> None:
        """Publish why this rank leaves, once, before its connections close: a rank that loses one reads the reason."""
        if self.report is None and not self._has_published_exit and self.here.world_size > 1:
            self._has_published_exit = True
            self.store.publish_exit_reason(reason, self.where())

    def linger(self) -> None:
        """Wait until the other ranks have read the report, if any: the store may end with this rank."""
        if self.report is not None:
            self.store.linger(self.report)

    def accept(self, report: FailureReport | None) -> None:
        """Keep the report of a failed group, acknowledge it, and wake all waiting threads and ranks.

        The report is kept because the store may be gone when this rank begins its next operation. Without a report,
        only wake threads and ranks.
        """
        self.report = self.report or report
        if report is not None:
            self.store.acknowledge()
        self.here.end()

    def publish(self, report: FailureReport) -> None:
        """End the group with this report, unless another rank has already published one."""
        # The monitor may have accepted another rank's report meanwhile: that rank, and the store, may be gone by now.
        self.report = self.report or self.store.post(report)
        self.store.acknowledge()
        self.here.end()

    def give_up(self, error: BaseException, position: RankPosition | None = None) -> None:
        """End the group because of this rank's own error, not a failure of the group; report the error to the peers."""
        if not self.here.closed and self.report is None:
            self.report = self.store.post(self._report_interrupted(type(error).__name__, position or self.where()))
            self.here.end()

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """End the operation and the group: a waiting thread was interrupted (Ctrl-C, a signal handler that raised).

        Notify the peers, and add to `error` the ranks for which this rank waited. `what` describes a message with
        `peer`; if it is empty, the operation is the collective. This waits at most about a second for the other ranks
        to report their positions.
        """
        if self.here.closed or self.report is not None:
            return
        where = self.where()
        if what:
            missing, positions = [peer] if peer >= 0 else [], None
            where = replace(where, operation=what, inside=True)
        else:
            positions = self.store.collect_positions()
            missing = self.missing(positions)
        self.give_up(error, where)
        if not error.args:
            operation = FailedOperation(
                where.operation if where.inside else "no operation", self.here.group, self.here.rank
            )
            error.args = (describe_interruption(operation, error, self.processes(*missing), positions),)
