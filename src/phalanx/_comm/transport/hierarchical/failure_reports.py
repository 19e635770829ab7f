"""Turn a rank's observation of a failure into the report that all ranks of the group raise."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from phalanx import _core
from phalanx._base.core_numbers import DEADLINE, MISMATCH, PEER_LOST
from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import COLLECT_REPORT_S, REPORT_S
from phalanx._base.processes import read_state
from phalanx._comm.diagnostics.failure_report import NOTHING_CALLED, FailureReport, RankCall, late
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition, read, read_position
from phalanx._comm.diagnostics.whereabouts import describe_end, late_ranks
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import Disagreement
from phalanx._comm.transport.group_reports import GroupReports, ReportingRank
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.hierarchical.rails import ConnectionBroken
from phalanx._comm.transport.shared_memory import SharedMemoryTransport
from phalanx.errors import ClosedError

_SOON_S = 0.01  # an engine counts milliseconds, and may time out a millisecond early


class LocalFailure(Exception):
    """The C core returned `status`, which is not OK."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class FailureReports(GroupReports):
    """`FailureReports` are a rank's reports, which it also publishes in its host's shared `memory`."""

    def __init__(self, here: ReportingRank, layout: Layout, memory: SharedMemoryTransport) -> None:
        super().__init__(here)
        self._layout = layout
        self._memory = memory

    def attach(self, store: FailureStore) -> None:
        """Set the store. Call this once the memory exists."""
        super().attach(store)
        store.find_local_report = self._find_local_report

    @property
    def _core(self) -> _core.Group:
        return self._memory.core

    def explain(self, cause: Exception, ctx: CallContext, deadline: Deadline, peer: int | None) -> FailureReport:
        """Return this rank's report of `cause`, or the report of a rank that knows more and publishes it first."""
        if isinstance(cause, LocalFailure) and cause.status == MISMATCH:  # the leader collects the calls, and reports
            known = self._reported_by_others(deadline.left_s + COLLECT_REPORT_S)
            return known or FailureReport("mismatch", calls=self.called_here())
        if isinstance(cause, Disagreement):
            known = self._reported_by_others(0.0)
            return known or FailureReport("mismatch", calls=cause.calls)
        if isinstance(cause, ConnectionBroken):
            if deadline.left_s < _SOON_S:
                return self._late(ctx.timeout_s, peer)
            # A rank that leaves closes its connections, which its own threads then find closed.
            who = self.here.rank if self._has_published_exit else cause.peer
            return (
                self._reported_by_others(REPORT_S)
                or self._server_lost(ctx.timeout_s, deadline)
                or self._lost(who, "its connection closed without notice (killed, crashed, or cut off)", peer)
            )
        assert isinstance(cause, LocalFailure)
        if cause.status == DEADLINE:
            return self._late(ctx.timeout_s, peer)
        if cause.status == PEER_LOST:
            local = self._core.poison()[1]
            # this rank's own number means that its monitor has ended the group on this host for another cause
            if local != self._layout.local_rank:
                # That rank may have ended the group on this host for a cause that it could not publish: no store.
                silence = self._server_lost(ctx.timeout_s, deadline)
                return silence or self._lost(
                    self._layout.local_ranks[local], describe_end(self._memory.symm_mem, local), peer
                )
        return (
            self._reported_by_others(REPORT_S)
            or self._server_lost(ctx.timeout_s, deadline)
            or FailureReport("internal", reason=f"the core answered {cause.status}")
        )

    def publish_on_host(self) -> None:
        """Write the report to this host's memory, where ranks can read it even if the store and this rank are gone.

        The first report there is kept. The ranks' positions are left out if there is no room.
        """
        if self.report is None:
            return
        for report in (self.report, replace(self.report, positions={})):
            if self._core.set_failure(report.to_json()):
                return

    def _find_local_report(self) -> FailureReport | None:
        """Return the report that a rank of this host has written to the shared memory, if any."""
        text = ""
        with contextlib.suppress(ClosedError):  # another thread may have closed the memory meanwhile
            text = self._core.failure()
        return FailureReport.from_json(text) if text else None

    def _reported_by_others(self, patience_s: float) -> FailureReport | None:
        report = self.store.await_report(patience_s)
        if report is None and self.store.are_positions_requested():
            return self.store.await_report(COLLECT_REPORT_S)
        return report

    def called_here(self) -> dict[int, RankCall]:
        """Return the last collective that each rank of this host has called, from its flight records."""
        calls = {}
        for local, r in enumerate(self._layout.local_ranks):
            collectives = [record for record in read(self._core, local) if record.is_collective]
            calls[r] = RankCall(collectives[-1].call(), collectives[-1].place) if collectives else NOTHING_CALLED
        return calls

    def _server_lost(self, timeout_s: float, deadline: Deadline) -> FailureReport | None:
        """If the store is silent, return the report that the rank which serves it is lost or hangs.

        That rank's neighbours may have detected the loss first, and closed their connections without being able to
        publish the reason. A rank that lost those connections would otherwise blame the neighbours.
        """
        fate = self.store.server_state()
        if fate is None:
            return None
        who, what = fate
        if what == "ended":
            return self._lost(who, "it served the job's store, which has ended (killed, or crashed)", None)
        return FailureReport(
            "late",
            (who,),
            self.processes(who),
            timeout_s=timeout_s if deadline.left_s < _SOON_S else 0.0,
            remarks=("It serves the job's store, which does not answer, though its host does.",),
        )

    def _lost(self, who: int, how: str, peer: int | None) -> FailureReport:
        """Return the report that `who` is lost. `peer` is the peer of a message; None in a collective."""
        reason, position = self.store.exit_reason(who)
        if position is None and who in self._layout.local_ranks:
            position = read_position(self._core, self._layout.local_ranks.index(who))
        return self.report_lost(who, reason or how, peer, position)

    def _late(self, timeout_s: float, peer: int | None) -> FailureReport:
        here = self._late_here()  # before requesting all positions: meanwhile late ranks may catch up
        answers = self._with_this_host(self.store.collect_positions(), here)
        if report := self._server_lost(timeout_s, Deadline.after(0.0)):
            return report
        if peer is None:
            missing = self.missing(answers, here)
        else:
            missing = [peer] if peer >= 0 else self.others()
        remarks: tuple[str, ...] = ()
        if missing and self.store.is_lost:
            # No rank can be queried. The ranks of this host are not late, or the core would have reported them.
            missing = [r for r in missing if r not in self._layout.local_ranks] or missing
            remarks = ("The job's store does not answer either: this host may be cut off.",)
        return late(
            missing, self.here.names, answers, self.here.rank, timeout_s, is_collective=peer is None, remarks=remarks
        )

    def _with_this_host(
        self, answers: Mapping[int, RankPosition], late_here: Collection[int]
    ) -> dict[int, RankPosition]:
        """Add to `answers` the positions of this host's ranks that did not answer in time, from its shared memory.

        On a busy host, a rank may need longer to answer. A stopped rank is left out, because it hangs.
        """
        found = dict(answers)
        for local, rank in enumerate(self._layout.local_ranks):
            process = self._memory.symm_mem.process_of(local)
            has_come = rank != self.here.rank and rank not in found and rank not in late_here
            if has_come and process.is_running() and read_state(process.pid) in ("R", "S", "D"):
                found[rank] = read_position(self._core, local)
        return found

    def _late_here(self) -> list[int]:
        late = late_ranks(self._core, self._layout.local_rank, len(self._layout.local_ranks))
        return [self._layout.local_ranks[r] for r in late]

    def missing(self, answers: Mapping[int, RankPosition], late_here: Sequence[int] = ()) -> list[int]:
        return decide_missing(
            self.others(), answers, self.here.seq, {*late_here, *self._late_here()}, self._layout.local_ranks[0]
        )


def decide_missing(
    others: Sequence[int], answers: Mapping[int, RankPosition], seq: int, late_here: Collection[int], leader: int
) -> list[int]:
    """Return the ranks of `others` for which a rank in collective `seq` waits. `answers` has the others' positions.

    `late_here` are the ranks of this host that are behind in its shared memory; `leader` is the host's first rank. A
    rank that is behind within the same collective waits for other hosts: it is named only if no other rank is to blame.
    The leader, which waits for other hosts in every collective, is not named even then.
    """
    waiting = {r for r in late_here if r in answers and answers[r].seq >= seq}
    missing = [r for r in others if r not in answers or answers[r].seq < seq]
    return missing or [r for r in others if r in waiting and r != leader]
