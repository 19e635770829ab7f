"""A `HierarchicalSession` wraps each operation between hosts: ranks agree first, and all report the same failure.

1  ranks of a host    copy the heads of their calls, and small tensors, to their leader in shared memory
2  the leaders        exchange these (see `exchange`); all ranks wait for the result (see `agreement`)
3  if ranks disagree, or a peer is lost or late, the first rank that detects this publishes a report in the job's store,
   ends the shared memory of its host and closes its connections, which wakes all ranks: they raise the same report
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from phalanx import _core
from phalanx._base.core_numbers import INVALID, KIND_NAMES, MISMATCH, OK, PEER_LOST
from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.diagnostics import failures
from phalanx._comm.diagnostics.failure_report import (
    LEFT,
    LEFT_IN_FLIGHT,
    FailedOperation,
    closed,
    describe_wait,
)
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.engines.engine import DELIVERY_S, Engine
from phalanx._comm.rendezvous.bootstrap import NOTICE_S
from phalanx._comm.symmetric_memory.memory import SymmetricMemory
from phalanx._comm.transport.background import GRACE_S, LOOK_EVERY_S, Background
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import CollectiveCall, Disagreement
from phalanx._comm.transport.health_monitor import HealthMonitor
from phalanx._comm.transport.hierarchical.bruck import open_exchange
from phalanx._comm.transport.hierarchical.compression import Compression
from phalanx._comm.transport.hierarchical.exchange import LeaderExchange
from phalanx._comm.transport.hierarchical.failure_reports import FailureReports, LocalFailure
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.hierarchical.preceding import Preceding
from phalanx._comm.transport.hierarchical.rails import ConnectionBroken, Rail
from phalanx._comm.transport.options import Options
from phalanx._comm.transport.shared_memory import SharedMemoryTransport
from phalanx.errors import PhalanxError

_logger = get_logger(__name__)
_SOON_S, _POLL_S, _LONGEST_POLL_S = 0.02, 2e-5, 2e-4  # a poll takes some 15 us: a short wait ends soon
_LATER_POLL_S = 2e-3  # a long one costs little
_KINDS = {name: kind for kind, name in KIND_NAMES.items()}


class Running:
    """A `Running` is one collective of a session, as a context manager that returns the collective's deadline.

    Its code is inlined, since a small collective takes only microseconds.
    """

    __slots__ = ("_call", "_ctx", "_deadline", "_record", "_session")

    def __init__(self, session: HierarchicalSession, call: CollectiveCall, ctx: CallContext) -> None:
        self._session = session
        self._call = call
        self._ctx = ctx
        self._deadline = Deadline.after(ctx.timeout_s)
        self._record = -1

    def __enter__(self) -> Deadline:
        session = self._session
        if not session.lock.acquire(blocking=False):
            session.reports.acquire_lock(self._call, self._ctx.timeout_s)
        try:
            self._record = session._begin(self._call, self._ctx)
        except BaseException:
            self._leave()
            raise
        if session.preceding.action is not None:
            try:
                session.preceding.carry_out(self._deadline)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self._deadline

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        session = self._session
        status = OK
        try:
            if error is not None:
                status = failures.status_of(error) if isinstance(error, PhalanxError) else INVALID
                try:
                    session._fail(error, session._operation_of(self._call), self._ctx, self._deadline)
                except PhalanxError as told:
                    status = failures.status_of(told)
                    raise
            else:
                session._inside = False
        finally:
            if not session.closed:
                session.core.end_record(self._record, status)
            self._leave()

    def _leave(self) -> None:
        self._session.lock.release()


class HierarchicalSession:
    """A `HierarchicalSession` is one rank's side of a group on several hosts, with memory, engine and failure store.

    It runs one collective at a time, and holds `lock` meanwhile.
    """

    def __init__(
        self, group: str, layout: Layout, options: Options, names: Sequence[str], numbers: Sequence[int] = ()
    ) -> None:
        self.group = group
        self.layout = layout
        self.lock = threading.Lock()
        self.rank = layout.rank
        self.world_size = layout.topology.world_size
        self.options = options
        self.names = tuple(names)  # descriptions of each rank's process: 'pid 17 on node3'
        self._numbers = tuple(numbers) or tuple(range(self.world_size))  # the ranks' numbers in the job
        self._memory = SharedMemoryTransport(group)
        self.seq = 0  # the number of collectives that this rank has begun
        self._said_seq = -1
        self._current: CollectiveCall | None = None  # the current call, or (unless `_inside`) the last
        self._inside = False
        self.entered_s = 0.0
        self.reports = FailureReports(self, layout, self._memory)
        self.compression = Compression(options.wire_dtype, error_feedback=options.error_feedback)
        self.engine: Engine = None  # type: ignore[assignment]  # set by `attach`, as in SharedMemoryTransport
        self.monitor: HealthMonitor | None = None
        self.rail: Rail | None = None
        self.leaders: LeaderExchange | None = None
        self.head = b""  # the head of the current call
        self._background, self.background_messages = Background(), Background()
        self.preceding = Preceding()

    def attach(self, symm_mem: SymmetricMemory, engine: Engine, failure_store: FailureStore) -> None:
        """Set the memory, the engine and the store. Call this before the first operation."""
        self._memory.attach(symm_mem)
        self.core.hide_steps()  # the flight recorder records the user's operations, not their parts
        self.engine = engine
        self.reports.attach(failure_store)
        layout, options = self.layout, self.options
        if layout.rail:
            self.rail = Rail(engine, layout.rail, layout.host, options.algorithm, self.compression, options.link)
        if layout.local_rank == 0:
            self.leaders = open_exchange(engine.short_messages, layout)
        self.monitor = HealthMonitor(failure_store, self.reports.where, self._is_over, self.reports.accept)

    @property
    def symm_mem(self) -> SymmetricMemory:
        return self._memory.symm_mem

    @property
    def closed(self) -> bool:
        return self._memory.closed

    @property
    def core(self) -> _core.Group:
        return self._memory.core

    def call_site(self, place: tuple[str, int]) -> int:
        """Return the number of a (file, line) in the table that other ranks and the agent can read."""
        return self._memory.call_site(place)

    def idle(self, waited_s: float) -> None:
        """Warn once per operation that this rank waits for ranks of its host. The core calls this while it waits."""
        # The error at the deadline has the ranks' positions; requesting them now would make every rank answer.
        if waited_s >= NOTICE_S and self._said_seq != self.seq and not self.closed:
            self._said_seq = self.seq
            operation, where = self.position.operation or "operation", "ranks of this host"
            _logger.warning("%s", describe_wait(operation, self.group, self.rank, (), waited_s, where))

    # -- the end -------------------------------------------------------------------------------------------------

    def set_exit_reason(self, exit_reason: str) -> None:
        """Set how this process ends, as text for the other ranks' errors."""
        self._memory.set_exit_reason(exit_reason)
        self.reports.publish_exit_reason(exit_reason)
        self.reports.linger()
        self._deliver()

    def leave_in_flight(self) -> None:
        """Wake the operations of this process that are still running, because their memory will be released."""
        self._memory.set_exit_reason(LEFT_IN_FLIGHT)
        self.reports.publish_exit_reason(LEFT_IN_FLIGHT)
        self.end()

    def close(self) -> None:
        """Leave the group. All ranks that wait for this one are notified at once."""
        if self.monitor is not None:
            self.monitor.close()
        if not self._memory.closed:
            self.reports.publish_exit_reason(LEFT)
            self.reports.linger()
            self._memory.close()
            self._deliver()
            self.engine.close()
        self.preceding.close()
        self._background.close()
        self.background_messages.close()
        if self.engine is not None:
            self.engine.free()

    def _deliver(self) -> None:
        """Wait until the data that this rank has sent have arrived: closing the connections discards the rest."""
        if self.reports.report is None:
            self.engine.deliver(Deadline.after(DELIVERY_S))

    def _is_over(self) -> bool:
        # A mismatch on this host ends the group only once the leader has collected the calls of the other hosts' ranks.
        return self.core.poison()[0] not in (OK, MISMATCH)

    def end(self) -> None:
        """Write the report to this host's memory; then wake the ranks that wait on this host, or for this rank."""
        if not self.closed:
            self.reports.publish_on_host()
            self.core.set_poison(PEER_LOST, self.layout.local_rank)
        self.engine.close()

    # -- around an operation -------------------------------------------------------------------------------------

    def place(self, ctx: CallContext) -> str:
        return self._memory.place(ctx.call_site)

    def interruptible(self, call: CollectiveCall, ctx: CallContext, operation: Callable[[], None]) -> None:
        """Run `operation`, which waits in an engine that may ignore signals and lost peers.

        With such an engine, another thread runs the operation while this thread waits for that thread. Ctrl-C ends the
        operation and the group, and so does a lost connection, which Gloo does not report to a thread whose message has
        begun to arrive.
        """
        if self.engine.is_interruptible or self.closed:
            operation()
            return
        self.reports.check(self._operation_of(call))
        look = self._watch_hosts(call, ctx, Deadline.after(ctx.timeout_s))
        self._background.run(operation, look, self.reports.interrupted)

    def wait_until(self, is_done: Callable[[], bool], call: CollectiveCall, ctx: CallContext) -> None:
        """Wait until `is_done` returns True, as it does at the engine's timeout, too; a lost connection ends the group.

        This thread polls, and so learns of the end of Gloo's collective sooner than from a second thread that waits.
        """
        look = self._watch_hosts(call, ctx, Deadline.after(ctx.timeout_s))
        next_look_s = time.monotonic() + LOOK_EVERY_S

        def look_at_times() -> None:
            nonlocal next_look_s
            if time.monotonic() < next_look_s:
                return
            if not Deadline.after(GRACE_S).wait_until(is_done, _LONGEST_POLL_S):
                look()
            next_look_s = time.monotonic() + LOOK_EVERY_S

        if not Deadline.after(_SOON_S).wait_until(is_done, _POLL_S, _LONGEST_POLL_S):
            Deadline.after(None).wait_until(is_done, _LATER_POLL_S, check=look_at_times)

    def _watch_hosts(self, call: CollectiveCall, ctx: CallContext, deadline: Deadline) -> Callable[[], None]:
        """Return a function that ends the group, and raises, if a connection to another host is lost."""
        abroad = [r for r in range(self.world_size) if r not in self.layout.local_ranks]

        def lost(peer: int, error: RuntimeError) -> None:
            self._fail(ConnectionBroken(peer, str(error)), self._operation_of(call), ctx, deadline)

        return self.reports.watch_peers(self.engine, abroad, lost)

    def running(self, call: CollectiveCall, ctx: CallContext) -> Running:
        """Return a context manager for one numbered collective; a failure becomes the error that all ranks raise.

        Raises:
            MismatchError: the ranks' calls differ; no tensor was changed.
            PeerLostError, DeadlineError: a rank died or is late.
        """
        return Running(self, call, ctx)

    def _begin(self, call: CollectiveCall, ctx: CallContext) -> int:
        """Take the next sequence number, and begin a record in the flight recorder; return the record's number."""
        if self.closed:
            raise closed(self.group)
        self.seq += 1
        self.reports.check(self._operation_of(call))
        self._current, self._inside = call, True
        self.entered_s = time.monotonic()
        self.head = call.head(self.seq)
        core = self.core
        core.set_awaited(ctx.awaited)  # a background thread does not spin, and leaves the CPU to threads that compute
        root = self._numbers[call.root] if call.root >= 0 else -1
        about = (max(call.dtype, 0), max(call.redop, 0), root, -1, max(call.count, 0))
        return core.begin_record(self.seq, _KINDS[call.name], *about, ctx.call_site, call.shape)

    @property
    def position(self) -> RankPosition:
        """Return the position of this rank, for ranks that request it."""
        call, inside = self._current, self._inside
        return RankPosition() if call is None else RankPosition(self.seq, self._operation_of(call).place, inside=inside)

    def _operation_of(self, call: CollectiveCall) -> FailedOperation:
        return FailedOperation(f"{call.name} #{self.seq}", self.group, self.rank, self.seq, call.place)

    @contextlib.contextmanager
    def recorded(self, call: CollectiveCall, ctx: CallContext, peer: int) -> Iterator[None]:
        """Record the block as one message in the flight recorder; messages have no sequence numbers."""
        peer = self._numbers[peer] if peer >= 0 else -1
        about = (max(call.dtype, 0), 0, -1, peer, max(call.count, 0))
        number = self.core.begin_record(1, _KINDS[call.name], *about, ctx.call_site, call.shape)
        status = INVALID
        try:
            yield
            status = OK
        except PhalanxError as error:
            status = failures.status_of(error)
            raise
        finally:
            if not self.closed:
                self.core.end_record(number, status)

    @contextlib.contextmanager
    def reporting(self, operation: FailedOperation, ctx: CallContext, deadline: Deadline, peer: int) -> Iterator[None]:
        """Convert an error in this block, which waits only for `peer`, to the error that all ranks raise."""
        try:
            yield
        except BaseException as error:
            self._fail(error, operation, ctx, deadline, peer)
            raise

    def _fail(
        self,
        error: BaseException,
        operation: FailedOperation,
        ctx: CallContext,
        deadline: Deadline,
        peer: int | None = None,
    ) -> None:
        """End the group after an operation that failed with `error`, so that all ranks report the same failure.

        Raises:
            PhalanxError: the group's error, unless `error` is not a failure of the group.
        """
        if isinstance(error, LocalFailure | ConnectionBroken | Disagreement):
            self.reports.fail(operation, partial(self.reports.explain, error, ctx, deadline, peer))
        if isinstance(error, Exception):
            self.reports.give_up(error)
        else:  # Ctrl-C
            self.reports.interrupted(error)
