"""Around every operation between hosts: agree before data moves, and end with one report when something goes wrong.

    1  ranks of a host    gather each other's fingerprints in shared memory
    2  each rail          exchange their hosts' fingerprints: once they are here, every rail knows every rank's call
    3  a disagreement, a lost or a late peer: whoever sees it first posts the report in the job's store, ends the
       shared memory of its host and closes its connections; whoever is woken by that tells the same report

No tensor of the user changes before 2 is over: the first step in shared memory that writes one waits for all ranks of
the host, rails included. Data may travel from scratch to scratch meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from phalanx import _core
from phalanx.coordination.bootstrap import NOTICE_S
from phalanx.deadline import Deadline
from phalanx.diagnostics import failures
from phalanx.diagnostics.failure_report import (
    LEFT,
    LEFT_IN_FLIGHT,
    FailureReport,
    Operation,
    closed,
    describe_interruption,
    describe_wait,
)
from phalanx.diagnostics.failure_store import FailureStore
from phalanx.diagnostics.flight_recorder import KINDS, Position
from phalanx.engines.engine import Engine
from phalanx.errors import PhalanxError
from phalanx.log import get_logger
from phalanx.symmetric_memory.memory import SymmetricMemory, timeout_ns
from phalanx.transport.call import BLOCK_BYTES, Call, digest_of, disagreement, payload_of, split_blocks
from phalanx.transport.hierarchical.compression import Wire
from phalanx.transport.hierarchical.failure_reports import Disagreement, LocalFailure, Reports
from phalanx.transport.hierarchical.health_monitor import HealthMonitor
from phalanx.transport.hierarchical.layout import Layout
from phalanx.transport.hierarchical.rails import ConnectionBroken, Message, Rail
from phalanx.transport.options import Options
from phalanx.transport.shared_memory import CallContext, SharedMemory

_logger = get_logger(__name__)
_KINDS = {name: kind for kind, name in KINDS.items()}


class Session(Reports):
    """One rank's side of a group whose ranks are on several hosts: its host's memory, the engine and the failure store.

    One collective at a time: `lock` is held while it runs.
    """

    def __init__(
        self, group: str, layout: Layout, options: Options, names: Sequence[str], numbers: Sequence[int] = ()
    ) -> None:
        self.group = group
        self.layout = layout
        self.lock = threading.Lock()
        self.rank = layout.rank
        self.world_size = layout.topology.world_size
        self._options = options
        self._names = tuple(names)  # how people call each rank's process: 'pid 17 on node3'
        self._numbers = tuple(numbers) or tuple(range(self.world_size))  # the ranks' numbers in the job
        self._memory = SharedMemory(group)
        self._seq = 0
        self._said_seq = -1
        self._has_said = False  # how this rank ends
        self._position = Position()
        self._entered_s = 0.0
        self._report: FailureReport | None = None
        self._wire = Wire(options.wire_dtype, error_feedback=options.error_feedback)
        self._engine: Engine = None  # type: ignore[assignment]  # set by `attach`, as in SharedMemory
        self._failure_store: FailureStore = None  # type: ignore[assignment]
        self._monitor: HealthMonitor | None = None
        self._rail: Rail | None = None
        self._blocks = bytearray(BLOCK_BYTES * self.world_size)  # all ranks' fingerprints, host after host
        self._mine = bytearray(BLOCK_BYTES)
        self._digest = 0  # of the call that is under way
        self._answers: list[Message] = []  # the other hosts' fingerprints, under way

    def attach(self, symm_mem: SymmetricMemory, engine: Engine, failure_store: FailureStore) -> None:
        """Take the memory, the engine and the store; before the first operation."""
        self._memory.attach(symm_mem)
        self._core.hide_steps()  # the flight recorder tells the user's operations, not what they are made of
        self._engine = engine
        self._failure_store = failure_store
        if self.layout.rail:
            options = self._options
            self._rail = Rail(engine, self.layout.rail, self.layout.host, options.algorithm, self._wire, options.link)
        self._monitor = HealthMonitor(self.group, failure_store, self._where, self._is_over, self._take_report)

    @property
    def symm_mem(self) -> SymmetricMemory:
        """The memory of this host."""
        return self._memory.symm_mem

    @property
    def closed(self) -> bool:
        """Whether this process has left."""
        return self._memory.closed

    @property
    def seq(self) -> int:
        """How many collectives this rank has begun."""
        return self._seq

    @property
    def _core(self) -> _core.Group:
        return self._memory.core

    def site(self, place: tuple[str, int]) -> int:
        """The number of a (file, line) in the table that other ranks and the agent can read."""
        return self._memory.site(place)

    def idle(self, waited_s: float) -> None:
        """The core calls this while it waits for ranks of this host: say so once per operation."""
        # What the others do is told when time runs out; to ask them now would cost a question where everybody is.
        if waited_s >= NOTICE_S and self._said_seq != self._seq and not self.closed:
            self._said_seq = self._seq
            operation, where = self._position.operation or "operation", "ranks of this host"
            _logger.warning("%s", describe_wait(operation, self.group, self.rank, (), waited_s, where))

    # -- the end -------------------------------------------------------------------------------------------------

    def leave_note(self, note: str) -> None:
        """How this process ends, for those who will miss it."""
        self._memory.leave_note(note)
        self._say_exit_reason(note)
        self._linger()

    def leave_in_flight(self) -> None:
        """Operations are still running here: wake them, for their memory is about to go."""
        self._memory.leave_note(LEFT_IN_FLIGHT)
        self._say_exit_reason(LEFT_IN_FLIGHT)
        self._end()

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears it at once."""
        if self._monitor is not None:
            self._monitor.close()
        if not self._memory.closed:
            self._say_exit_reason(LEFT)
            self._linger()
            self._memory.close()
            self._engine.close()

    def _say_exit_reason(self, reason: str) -> None:
        """Before the connections close: whoever loses one asks the store why. What is said first stands."""
        if self._report is None and not self._has_said:
            self._has_said = True
            self._failure_store.leave_exit_reason(reason, self._where())

    def _linger(self) -> None:
        if self._report is not None:
            self._failure_store.linger(self._report)

    def _is_over(self) -> bool:
        return self._core.poison()[0] != failures.OK

    def _take_report(self, report: FailureReport | None) -> None:
        """The group is over. Keep the report: the store may be gone when this rank comes to the next operation."""
        self._report = self._report or report
        if report is not None:
            self._failure_store.acknowledge()
        self._end()

    def _end(self) -> None:
        """Wake everybody who waits on this host or for it."""
        if not self.closed:
            self._core.set_poison(failures.PEER_LOST, self.layout.local_rank)
        self._engine.close()

    # -- around an operation -------------------------------------------------------------------------------------

    def _place(self, ctx: CallContext) -> str:
        return self._memory.place(ctx.site)

    @contextlib.contextmanager
    def _collective(
        self, call: Call, ctx: CallContext, *, early: bool = False, payload: bytes | None = None
    ) -> Iterator[Deadline]:
        """Agree on `call` with all ranks; what fails inside becomes the error that all ranks tell.

        A `payload` of up to PAYLOAD_BYTES travels with the fingerprint: the body finds all ranks' in `_brought`. With
        `early` the body begins when the ranks of this host agree. It calls `_agree` before it waits for any other
        host's data, and writes nothing of the user's before that.

        Raises:
            MismatchError: some rank called something else; no tensor was changed.
            PeerLostError, DeadlineError: a rank died or is late.
        """
        with self.lock, torch.no_grad():
            if self.closed:
                raise closed(self.group)
            self._seq += 1
            operation = Operation(f"{call.name} #{self._seq}", self.group, self.rank, self._seq, call.place)
            self._entered_s = time.monotonic()
            self._position = Position(self._seq, operation.place, inside=True)
            deadline = Deadline.after(ctx.timeout_s)
            self._core.set_awaited(ctx.awaited)  # a thread in the background leaves the core to who computes
            with self._recorded(call, ctx), self._told(operation, ctx, deadline):
                self._begin_to_agree(call, ctx, deadline, payload or b"")
                if not early:
                    self._agree()
                if payload is not None:
                    self._share_what_came(ctx, deadline)
                yield deadline
            self._position = Position(self._seq, operation.place)

    @contextlib.contextmanager
    def _recorded(self, call: Call, ctx: CallContext, *, peer: int = -1) -> Iterator[None]:
        """What happens inside is one line of the flight recorder. Messages have no place in the sequence."""
        root, peer = (self._numbers[r] if r >= 0 else -1 for r in (call.root, peer))
        kind, seq = _KINDS[call.name], self._seq if call.name not in ("send", "recv") else 1
        about = (max(call.dtype, 0), max(call.redop, 0), root, peer, max(call.count, 0))
        number = self._core.begin_record(seq, kind, *about, ctx.site, call.shape)
        status = failures.INVALID
        try:
            yield
            status = failures.OK
        except PhalanxError as error:
            status = failures.status_of(error)
            raise
        finally:
            if not self.closed:
                self._core.end_record(number, status)

    @contextlib.contextmanager
    def _told(
        self, operation: Operation, ctx: CallContext, deadline: Deadline, peer: int | None = None
    ) -> Iterator[None]:
        """Turn what fails inside into the error that all ranks raise. `peer`: only that rank is waited for."""
        try:
            yield
        except (LocalFailure, ConnectionBroken, Disagreement) as cause:
            if self._report is None:
                report = self._failure_store.report() or self._explain(cause, ctx, deadline, peer)
                report = self._failure_store.post(report)
                # The monitor may have read the report of another rank meanwhile: that rank may be gone by now, with
                # the store, for it was told that this one knows.
                self._report = self._report or report
            self._failure_store.acknowledge()
            self._end()
            raise self._report.error(operation) from None
        except BaseException as error:
            self._broke(error)
            raise

    def _broke(self, error: BaseException) -> None:
        """Something that is no failure of the group ended the operation: the peers should hear what."""
        self._give_up(type(error).__name__, self._where())

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """Whoever waits for an operation of this group was interrupted (Ctrl-C, a signal handler that raised).

        Ends the operation and the group, tells the peers, and says in `error` what was waited for. `what`: a message
        with `peer`; else it is the collective. Takes a second at most, in which the others say where they are.
        """
        if self.closed or self._report is not None:
            return
        where = self._where()
        if what:
            missing, positions = [peer] if peer >= 0 else [], None
            where = replace(where, operation=what, inside=True)
        else:
            positions = self._failure_store.collect_positions()
            missing = self._missing(positions)
        self._give_up(type(error).__name__, where)
        if not error.args:
            label = where.operation if where.inside else "no operation"
            operation = Operation(label, self.group, self.rank)
            error.args = (describe_interruption(operation, error, self._processes(*missing), positions),)

    def _give_up(self, reason: str, position: Position) -> None:
        if self.closed:
            return
        me = self.rank
        report = FailureReport("interrupted", (me,), self._processes(me), {me: position}, reason=reason)
        self._report = self._failure_store.post(report)
        self._end()

    def _begin_to_agree(self, call: Call, ctx: CallContext, deadline: Deadline, payload: bytes) -> None:
        layout = self.layout
        self._mine[:] = call.block(self._seq, payload)
        self._digest = digest_of(self._mine)
        blocks = torch.frombuffer(self._blocks, dtype=torch.uint8)
        parts = torch.split(blocks, [len(host) * BLOCK_BYTES for host in layout.topology.hosts])
        here = parts[layout.host]
        self._gather_here(
            torch.frombuffer(self._mine, dtype=torch.uint8),
            list(torch.split(here, BLOCK_BYTES)),
            ctx,
            deadline,
        )
        self._answers = []
        if self._rail is not None:
            self._answers = self._rail.exchange(
                here, [p if h != layout.host else None for h, p in enumerate(parts)], deadline
            )
        if disagreement(self._known(layout.local_ranks), self._seq):
            self._agree()

    def _agree(self) -> None:
        """Return when all ranks are known to have called the same, as far as this rank can know it."""
        for answer in self._answers:
            answer.wait()
        self._answers = []
        everybody = self._rail is not None
        if calls := disagreement(self._known(self.layout.by_host if everybody else self.layout.local_ranks), self._seq):
            raise Disagreement(calls, complete=everybody)

    def _share_what_came(self, ctx: CallContext, deadline: Deadline) -> None:
        """The ranks without a rail have not seen what the other hosts' ranks bring."""
        if len(self.layout.local_ranks) > self.layout.num_rails:
            blocks = torch.frombuffer(self._blocks, dtype=torch.uint8)
            self._broadcast_here(blocks, 0, ctx, deadline)

    def _brought(self) -> list[bytes]:
        """The ranks' payloads, by rank."""
        known = self._known(range(self.world_size))
        return [payload_of(known[r]) for r in range(self.world_size)]

    def _known(self, ranks: Sequence[int]) -> dict[int, bytes]:
        blocks = split_blocks(bytes(self._blocks), self.layout.by_host)
        return {r: blocks[r] for r in ranks}

    # -- steps in the memory of this host ------------------------------------------------------------------------

    def _checked(self, status: int) -> None:
        if status != failures.OK:
            raise LocalFailure(status)

    def _gather_here(
        self, mine: torch.Tensor, parts: Sequence[torch.Tensor], ctx: CallContext, deadline: Deadline, dtype: int = 0
    ) -> None:
        """parts[i] becomes local rank i's `mine`, on every rank of the host. `mine` may be its own part."""
        self._checked(
            self._core.gather(
                mine.data_ptr(),
                tuple(part.data_ptr() for part in parts),
                tuple(part.nbytes for part in parts),
                dtype,
                -1,
                timeout_ns(deadline.left_s),
                ctx.site,
                mine.shape,
            )
        )

    def _broadcast_here(self, data: torch.Tensor, local_root: int, ctx: CallContext, deadline: Deadline) -> None:
        """`data` (bytes) becomes that of `local_root`, on every rank of the host."""
        at, size = data.data_ptr(), len(data)
        self._checked(self._core.broadcast(at, size, 0, local_root, timeout_ns(deadline.left_s), ctx.site, data.shape))
