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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx import _core
from phalanx.coordination.bootstrap import NOTICE_S, ranks
from phalanx.deadline import Deadline
from phalanx.diagnostics import failures
from phalanx.diagnostics.failure_store import OVER, FailureReport, FailureStore, Position
from phalanx.diagnostics.flight_recorder import KINDS
from phalanx.engines.engine import Engine
from phalanx.errors import PhalanxError
from phalanx.log import get_logger
from phalanx.symmetric_memory.memory import SymmetricMemory, timeout_ns
from phalanx.transport.call import BLOCK_BYTES, Call, digest_of, disagreement, payload_of, split_blocks
from phalanx.transport.hierarchical.compression import Wire
from phalanx.transport.hierarchical.health_monitor import HealthMonitor
from phalanx.transport.hierarchical.layout import Layout
from phalanx.transport.hierarchical.rails import ConnectionBroken, Message, Rail
from phalanx.transport.options import Options
from phalanx.transport.shared_memory import CallContext, SharedMemory

_logger = get_logger(__name__)
_KINDS = {name: kind for kind, name in KINDS.items()}

# How long a broken connection waits for somebody who saw the cause: the dead rank's neighbours notice within 50 ms.
_PATIENCE_S = 0.4
_ROLL_CALL_PATIENCE_S = 1.5
_SOON_S = 0.01  # an engine counts milliseconds, and may give up one early


class LocalFailure(Exception):
    """The C core returned `status`, not zero."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Disagreement(Exception):
    """The ranks called different things. `complete`: all ranks' calls are known, not only this host's."""

    def __init__(self, calls: dict[int, str], *, complete: bool) -> None:
        super().__init__(calls)
        self.calls = calls
        self.complete = complete


class Session:
    """One rank's side of a group whose ranks are on several hosts: its host's memory, the engine and the bulletin.

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
        self._position = Position(0, False, "has called nothing yet")
        self._report: FailureReport | None = None
        self._wire = Wire(options.wire_dtype, error_feedback=options.error_feedback)
        self._engine: Engine = None  # type: ignore[assignment]  # set by `attach`, as in SharedMemory
        self._failure_store: FailureStore = None  # type: ignore[assignment]
        self._attendant: HealthMonitor | None = None
        self._rail: Rail | None = None
        self._blocks = bytearray(BLOCK_BYTES * self.world_size)  # all ranks' fingerprints, host after host
        self._mine = bytearray(BLOCK_BYTES)
        self._digest = 0  # of the call that is under way
        self._answers: list[Message] = []  # the other hosts' fingerprints, under way

    def attach(self, symm_mem: SymmetricMemory, engine: Engine, failure_store: FailureStore) -> None:
        """Take the seat; before the first operation."""
        self._memory.attach(symm_mem)
        self._core.hide_steps()  # the flight recorder tells the user's operations, not what they are made of
        self._engine = engine
        self._failure_store = failure_store
        if self.layout.rail:
            options = self._options
            self._rail = Rail(engine, self.layout.rail, self.layout.host, options.algorithm, self._wire, options.link)
        self._attendant = HealthMonitor(self.group, failure_store, lambda: self._position, self._is_over, self._heard)

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
            _logger.warning("%s: waiting for ranks of this host for %.0f s", self._here(), waited_s)

    # -- the end -------------------------------------------------------------------------------------------------

    def leave_note(self, note: str) -> None:
        """How this process ends, for those who will miss it."""
        self._memory.leave_note(note)
        self._failure_store.leave_note(note)
        self._linger()

    def leave_in_flight(self) -> None:
        """Operations are still running here: wake them, for their memory is about to go."""
        self._memory.leave_note("it left the group while its operations were in flight (destroy_process_group)")
        self._end()

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears it at once."""
        if self._attendant is not None:
            self._attendant.close()
        if not self._memory.closed:
            self._linger()
            self._memory.close()
            self._engine.close()

    def _linger(self) -> None:
        if self._report is not None:
            self._failure_store.linger(self._report)

    def _is_over(self) -> bool:
        return self._core.poison()[0] != failures.OK

    def _heard(self, report: FailureReport | None) -> None:
        """The group is over. Keep the report: the store may be gone when this rank comes to the next operation."""
        self._report = self._report or report
        if report is not None:
            self._failure_store.mark_heard()
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
                raise failures.closed(self.group)
            self._seq += 1
            label = f"{call.name} #{self._seq}"
            place = f" ({call.place})" if call.place else ""
            self._position = Position(self._seq, True, f"is in {label}{place}")
            deadline = Deadline.after(ctx.timeout_s)
            self._core.set_awaited(ctx.awaited)  # a thread in the background leaves the core to who computes
            with self._recorded(call, ctx), self._told(self._here(label), ctx, deadline):
                self._begin_to_agree(call, ctx, deadline, payload or b"")
                if not early:
                    self._agree()
                if payload is not None:
                    self._share_what_came(ctx, deadline)
                yield deadline
            self._position = Position(self._seq, False, f"last finished {label}{place}")

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
    def _told(self, here: str, ctx: CallContext, deadline: Deadline, peer: int | None = None) -> Iterator[None]:
        """Turn what fails inside into the group's story. `peer`: only that rank is waited for."""
        try:
            yield
        except (LocalFailure, ConnectionBroken, Disagreement) as cause:
            if self._report is None:
                report = self._failure_store.report() or self._tell(cause, ctx, deadline, peer)
                self._report = self._failure_store.post(report)
            self._failure_store.mark_heard()
            self._end()
            raise self._report.error(here) from None
        except BaseException as error:
            self._broke(error)
            raise

    def _here(self, label: str = "operation") -> str:
        return f"{label} in group {self.group!r} on rank {self.rank}"

    def _broke(self, error: BaseException) -> None:
        """Something that is no failure of the group ended the operation: the peers should hear what."""
        self._give_up(f"stopped ({type(error).__name__}) while the group waited; it {self._position.text}.")

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """Whoever waits for an operation of this group was interrupted (Ctrl-C, a signal handler that raised).

        Ends the operation and the group, tells the peers, and says in `error` what was waited for. `what`: a message
        with `peer`; else it is the collective. Takes a second at most, in which the others say where they are.
        """
        if self.closed or self._report is not None:
            return
        name = type(error).__name__
        text = self._position.text.removeprefix("is in ") if self._position.inside else "no operation"
        if what:
            text, missing, answers = what, [peer] if peer >= 0 else [], {}
        else:
            answers = self._failure_store.collect_positions()
            missing = self._missing(answers)
        self._give_up(f"was interrupted ({name}) in {text} while the group waited.")
        awaited = f"waiting for {ranks(missing)}" if missing else "under way"
        lines = [f"Rank {r} ({self._names[r]}) {_whereabouts(answers.get(r))}." for r in missing if not what]
        if not error.args:
            error.args = ("\n".join([f"{self._here(text)}: interrupted ({name}); it was {awaited}.", *lines, OVER]),)

    def _give_up(self, text: str) -> None:
        if self.closed:
            return
        who = f"rank {self.rank} ({self._names[self.rank]})"
        self._report = self._failure_store.post(FailureReport("lost", f"{who} {text}", ranks=(self.rank,)))
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
        if disagreement(self._known(layout.local_ranks)):
            self._agree()

    def _agree(self) -> None:
        """Return when all ranks are known to have called the same, as far as this rank can know it."""
        for answer in self._answers:
            answer.wait()
        self._answers = []
        everybody = self._rail is not None
        if calls := disagreement(self._known(self.layout.by_host if everybody else self.layout.local_ranks)):
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

    # -- stories -------------------------------------------------------------------------------------------------

    def _tell(self, cause: Exception, ctx: CallContext, deadline: Deadline, peer: int | None) -> FailureReport:
        """What this rank makes of `cause`, unless somebody who knows more speaks first."""
        if isinstance(cause, Disagreement):
            return self._told_by_others(_PATIENCE_S if not cause.complete else 0.0) or _mismatch(cause.calls)
        if isinstance(cause, ConnectionBroken):
            if deadline.left_s < _SOON_S:
                return self._late(ctx.timeout_s, peer)
            return (
                self._told_by_others(_PATIENCE_S)
                or self._told_by_silence(ctx.timeout_s, deadline)
                or self._lost(cause.peer, "its connection closed without a word (killed, crashed, or cut off)")
            )
        assert isinstance(cause, LocalFailure)
        if cause.status == failures.DEADLINE:
            return self._late(ctx.timeout_s, peer)
        if cause.status == failures.PEER_LOST:
            local = self._core.poison()[1]
            if local != self.layout.local_rank:  # our own number: the attendant ended the memory for another cause
                return self._lost(self.layout.local_ranks[local], failures.how_it_ended(self.symm_mem, local))
        return (
            self._told_by_others(_PATIENCE_S)
            or self._told_by_silence(ctx.timeout_s, deadline)
            or FailureReport("broken", f"the core answered {cause.status}.")
        )

    def _told_by_silence(self, timeout_s: float, deadline: Deadline) -> FailureReport | None:
        """Where nobody can tell anything, because the rank that keeps the store cannot: then it is that one.

        Its neighbours heard of it first and closed their connections, without being able to say why: whoever lost
        those would blame them.
        """
        fate = self._failure_store.keeper_fate()
        if fate is None:
            return None
        who, what = fate
        if what == "ended":
            return self._lost(who, "the job's store, which it kept, is gone with it (killed, or crashed)")
        ctx = f" within {timeout_s:.1f} s" if deadline.left_s < _SOON_S else ""
        return FailureReport(
            "late",
            f"no answer from rank {who}{ctx}.\nRank {who} ({self._names[who]}) keeps the job's store, which does not "
            "answer, though its host does: it hangs, or is stopped.\n"
            "Read the log of the missing rank first; if it is only slow, raise `timeout`.",
            ranks=(who,),
        )

    def _told_by_others(self, patience_s: float) -> FailureReport | None:
        report = self._failure_store.await_report(patience_s)
        if report is None and self._failure_store.wants_positions():
            return self._failure_store.await_report(_ROLL_CALL_PATIENCE_S)
        return report

    def _lost(self, who: int, how: str) -> FailureReport:
        how = self._failure_store.note_of(who) or how
        text = f"rank {who} ({self._names[who]}) is gone: {how}.\nRead its log first."
        return FailureReport("lost", text, ranks=(who,))

    def _late(self, timeout_s: float, peer: int | None) -> FailureReport:
        here = self._late_here()  # before they come after all: the question where everybody is gives them time
        answers = self._failure_store.collect_positions()
        if report := self._told_by_silence(timeout_s, Deadline.after(0.0)):
            return report
        if peer is None:
            missing = self._missing(answers, here)
        else:
            missing = [peer] if peer >= 0 else [r for r in range(self.world_size) if r != self.rank]
        if not missing:
            return FailureReport(
                "late",
                f"time ran out after {timeout_s:.1f} s; by now every rank has come.\n"
                "A rank or the network is too slow: raise `timeout`.",
            )
        if (
            self._failure_store.is_gone
        ):  # nobody can be asked: those of this host have come, or the core would have said
            missing = [r for r in missing if r not in self.layout.local_ranks] or missing
        lines = [f"Rank {r} ({self._names[r]}) {_whereabouts(answers.get(r))}." for r in missing]
        if self._failure_store.is_gone:
            lines.append("The job's store does not answer either: this host may be cut off.")
        text = "\n".join(
            (
                f"no answer from {ranks(missing)} within {timeout_s:.1f} s.",
                *lines,
                "Read the log of the missing rank first; if it is only slow, raise `timeout`.",
            )
        )
        return FailureReport("late", text, ranks=tuple(missing))

    def _late_here(self) -> list[int]:
        late = failures.late(self._core, self.layout.local_rank, len(self.layout.local_ranks))
        return [self.layout.local_ranks[r] for r in late]

    def _missing(self, answers: Mapping[int, Position], late_here: Sequence[int] = ()) -> list[int]:
        """Who has not come as far as this rank, or does not answer."""
        late = {*late_here, *self._late_here()}
        others = (r for r in range(self.world_size) if r != self.rank)
        return [r for r in others if r in late or r not in answers or answers[r].seq < self._seq]


def _whereabouts(position: Any) -> str:
    return position.text if position is not None else "does not answer: it hangs, is stopped, or is cut off"


def _mismatch(calls: dict[int, str]) -> FailureReport:
    lines = "\n".join(f"  rank {r}: {call}" for r, call in calls.items())
    text = (
        f"the ranks called different things; no tensor was changed.\n{lines}\n"
        "Make every rank call the same operation with the same dtype, size and options, in the same order."
    )
    return FailureReport("mismatch", text, calls=calls)
