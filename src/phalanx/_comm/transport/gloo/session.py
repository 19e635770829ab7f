"""A `GlooSession` wraps each operation over Gloo: the ranks agree first, and all report the same failure.

Gloo compares nothing, and reports a lost or late peer only as a broken connection. So the ranks first gather each
other's fingerprints, and move data only if all are equal. The rank that detects a failure first finds the cause,
publishes the report in the job's store and closes its connections, which wakes all others: they raise the same report.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._base.loss_detection import AFTER_BREAK_S
from phalanx._comm.diagnostics.call_sites import short
from phalanx._comm.diagnostics.failure_report import (
    KILLED,
    LEFT,
    LEFT_IN_FLIGHT,
    FailedOperation,
    FailureReport,
    closed,
    late,
)
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.engines.engine import DELIVERY_S, PendingMessage, timedelta_of
from phalanx._comm.engines.gloo import GlooEngine
from phalanx._comm.transport.background import WHOLE_BYTES, Background, look_at
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import HEAD_BYTES, CollectiveCall, Disagreement, disagreement, split_heads
from phalanx._comm.transport.group_reports import GroupReports
from phalanx._comm.transport.health_monitor import HealthMonitor
from phalanx._comm.transport.tensors import alias, flat

_PAUSE_S = 0.02
_SOON_S = 0.01  # Gloo counts milliseconds, and may time out a millisecond early


class GlooFailed(Exception):
    """Gloo could not finish: a peer is lost or late, or this rank has closed the connections."""


class GlooSession:
    """A `GlooSession` is one rank's side of a group over Gloo.

    `names` describes each rank's process for users, as 'pid 17 on node3'; `has_ended` returns whether a rank's process
    has ended. The session runs one collective at a time, and holds `lock` meanwhile.
    """

    def __init__(
        self,
        group: str,
        engine: GlooEngine,
        failure_store: FailureStore,
        names: Sequence[str],
        has_ended: Callable[[int], bool],
    ) -> None:
        self.group = group
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.lock = threading.Lock()
        self.names = tuple(names)
        self.seq = 0  # the number of collectives that this rank has begun
        self._sites: dict[str, int] = {"": 0}
        self._places = [""]  # by the number of the call site
        self.entered_s = 0.0  # when the last collective began, by `time.monotonic`
        self._at = RankPosition()
        self.engine = engine
        self.reports = GroupReports(self)
        self.reports.attach(failure_store)
        self._has_ended = has_ended
        self._background, self._background_messages = Background(), Background()
        self._process = os.getpid()
        self._is_closed = False
        self._monitor: HealthMonitor | None = None
        if self.world_size > 1:
            self._monitor = HealthMonitor(failure_store, self.reports.where, lambda: False, self.reports.accept)

    # -- the process group's queries -----------------------------------------------------------------------------

    @property
    def position(self) -> RankPosition:
        """Return the position of this rank."""
        return self._at

    def call_site(self, place: tuple[str, int]) -> int:
        """Return the number of a (file, line) for a `CallContext`."""
        text = f"{short(place[0])}:{place[1]}" if place[0] else ""
        number = self._sites.get(text)
        if number is None:
            number = self._sites[text] = len(self._places)
            self._places.append(text)
        return number

    def place(self, ctx: CallContext) -> str:
        """Return the 'file:line' of the call, or ""."""
        return self._places[ctx.call_site]

    @property
    def closed(self) -> bool:
        """Return whether this process has left, or is a fork of the process that joined."""
        return self._is_closed or os.getpid() != self._process

    def set_exit_reason(self, exit_reason: str) -> None:
        """Publish why this process ends, for the other ranks' errors."""
        self.reports.publish_exit_reason(exit_reason)
        self.reports.linger()

    def leave_in_flight(self) -> None:
        """Wake the operations of this process that are still running."""
        self.reports.publish_exit_reason(LEFT_IN_FLIGHT)
        self.engine.close()

    def close(self) -> None:
        """Leave the group. All ranks that wait for this one are notified at once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._monitor is not None:
            self._monitor.close()
        self.reports.publish_exit_reason(LEFT)
        self.reports.linger()
        if self.reports.report is None:
            self.engine.deliver(Deadline.after(DELIVERY_S))
        self.engine.close()
        self._background.close()
        self._background_messages.close()

    def end(self) -> None:
        """Wake the threads that wait here, and the ranks that wait for this one."""
        self.engine.close()

    # -- around a collective -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def collective(self, call: CollectiveCall, ctx: CallContext) -> Iterator[Deadline]:
        """Agree on `call` with all ranks; an error inside the block becomes the error that all ranks raise.

        Raises:
            MismatchError: the ranks' calls differ; no tensor was changed.
            PeerLostError, DeadlineError: a rank is lost or late.
        """
        self.reports.acquire_lock(call, ctx.timeout_s)
        try:
            with self._running(call, ctx) as deadline:
                yield deadline
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def _running(self, call: CollectiveCall, ctx: CallContext) -> Iterator[Deadline]:
        """Do the work of `collective`, under `lock`."""
        with torch.no_grad():
            self._check_open(FailedOperation(call.name, self.group, self.rank, call_site=call.place))
            self.seq += 1
            operation = FailedOperation(f"{call.name} #{self.seq}", self.group, self.rank, self.seq, call.place)
            self.entered_s = time.monotonic()
            self._at = RankPosition(self.seq, operation.place, inside=True)
            deadline = Deadline.after(ctx.timeout_s)
            with self.reporting(operation, deadline):
                self._agree(call, deadline)
                yield deadline
            self._at = RankPosition(self.seq, operation.place)

    def _agree(self, call: CollectiveCall, deadline: Deadline) -> None:
        if self.world_size == 1:
            return
        mine, heads = bytearray(call.head(self.seq)), bytearray(HEAD_BYTES * self.world_size)
        self._gather_heads(mine, heads, deadline)
        if calls := disagreement(split_heads(bytes(heads), range(self.world_size)), self.seq):
            raise Disagreement(calls)

    def _gather_heads(self, mine: bytearray, heads: bytearray, deadline: Deadline) -> None:
        into, head = (torch.frombuffer(data, dtype=torch.uint8) for data in (heads, mine))
        self.run("_allgather_base", [into, head], deadline)

    def run(self, method: str, arguments: Sequence[Any], deadline: Deadline, **options: Any) -> None:
        """Run one of Gloo's collectives on another thread, and wait for it.

        This thread can then handle Ctrl-C, and can detect a lost connection: once a message has begun to arrive, Gloo
        does not report the loss to the thread that waits for the message.
        """
        arguments = _aliases(arguments)

        def carry_out() -> None:
            with gloo_errors():
                self.engine.begin(method, arguments, timedelta_of(deadline), **options).wait()

        def lost(peer: int, error: RuntimeError) -> None:
            raise GlooFailed(str(error)) from error

        look = self.reports.watch_peers(self.engine, self.reports.others(), lost)
        self._background.run(carry_out, look, self.reports.interrupted)

    def wait_for(self, messages: Sequence[PendingMessage], peer: int, num_bytes: int, deadline: Deadline) -> None:
        """Wait for a message with `peer`; if the message may arrive in parts, wait on another thread, as in `run`."""

        def wait() -> None:
            with gloo_errors():
                for message in messages:
                    message.wait(timedelta_of(deadline))

        if num_bytes <= WHOLE_BYTES:
            wait()
        else:
            self._background_messages.run(wait, look_at(self.engine, peer, GlooFailed))

    def _check_open(self, operation: FailedOperation) -> None:
        if self.closed:
            raise closed(self.group)
        self.reports.check(operation)

    def check_tag(self, tag: int, num_tags: int) -> None:
        """Raise if the group has failed, or `tag` is invalid."""
        self._check_open(FailedOperation("send and recv", self.group, self.rank))
        if not 0 <= tag < num_tags:
            raise ValueError(f"send and recv: tag must be in 0..{num_tags - 1}, got {tag}")

    # -- reports -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting(self, operation: FailedOperation, deadline: Deadline, peer: int | None = None) -> Iterator[None]:
        """Convert an error in this block to the error that all ranks raise.

        `peer` is the rank for which this rank waits: a negative number means any rank, None means all ranks.
        """
        try:
            yield
        except (Disagreement, GlooFailed) as cause:
            self.reports.fail(operation, partial(self._explain, cause, deadline, peer))
        except BaseException as error:
            self.reports.give_up(error)
            raise

    def _explain(self, cause: Exception, deadline: Deadline, peer: int | None) -> FailureReport:
        """Return this rank's report of `cause`, or the report of a rank that knows more and has published it first."""
        if isinstance(cause, Disagreement):
            return FailureReport("mismatch", calls=cause.calls, is_collective=cause.is_collective)
        if deadline.left_s < _SOON_S:
            return self._explain_late(deadline.timeout_s, peer)
        patience = Deadline.after(AFTER_BREAK_S)
        while True:
            if report := self.reports.store.report() or self._find_lost(peer):
                return report
            if patience.passed:
                break
            time.sleep(_PAUSE_S)
        answers = self.reports.store.collect_positions()
        if fate := self.reports.store.server_state():
            return self.reports.report_lost(fate[0], "it served the job's store, which does not answer", peer)
        silent = next((r for r in self.reports.others() if r not in answers), None)
        if silent is None:
            return self.reports.store.report() or FailureReport("broken", reason=f"Gloo failed: {cause}")
        return self.reports.report_lost(
            silent, "its connection closed without notice (killed, crashed, or cut off)", peer
        )

    def _find_lost(self, peer: int | None) -> FailureReport | None:
        """Return the report of a rank that has left, or whose process has ended; None if there is none."""
        for r in self.reports.others():
            reason, position = self.reports.store.exit_reason(r)
            if reason:
                return self.reports.report_lost(r, reason, peer, position)
        ended = next((r for r in self.reports.others() if self._has_ended(r)), None)
        return None if ended is None else self.reports.report_lost(ended, KILLED, peer)

    def _explain_late(self, timeout_s: float, peer: int | None) -> FailureReport:
        answers = self.reports.store.collect_positions()
        if report := self.reports.store.report():  # another rank published first
            return report
        return self._report_late(answers, timeout_s, peer)

    def _report_late(self, answers: Mapping[int, RankPosition], timeout_s: float, peer: int | None) -> FailureReport:
        """Return the report that time ran out. `answers` has the others' positions; `peer` is as in `reporting`."""
        if peer is None:
            missing = self.reports.missing(answers)
        else:
            missing = [peer] if peer >= 0 else self.reports.others()
        return late(missing, self.names, answers, self.rank, timeout_s, is_collective=peer is None)


@contextlib.contextmanager
def gloo_errors() -> Iterator[None]:
    """Convert a RuntimeError that Gloo raises in this block to `GlooFailed`."""
    try:
        yield
    except RuntimeError as error:
        raise GlooFailed(str(error)) from error


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a plain tensor, without a copy."""
    return flat(tensor).view(torch.uint8)


def _aliases(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of one of Gloo's collectives, with tensors that any thread may write."""
    found: list[Any] = []
    for each in arguments:
        found.append(_aliases(each) if isinstance(each, list) else alias(each) if isinstance(each, Tensor) else each)
    return found
