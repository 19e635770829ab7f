"""Make a failure report from an error status of the C core and the shared memory of all ranks."""

from __future__ import annotations

from phalanx._base.core_numbers import (
    CLOSED,
    DEADLINE,
    INTERRUPTED,
    INVALID,
    MISMATCH,
    NO_MEMORY,
    PEER_LOST,
    RECV,
    SEND,
)
from phalanx._comm.diagnostics.divergence import describe_earlier_divergence, describe_left_alone
from phalanx._comm.diagnostics.failure_report import NOTHING_CALLED, FailedOperation, FailureReport, RankCall, closed
from phalanx._comm.diagnostics.flight_recorder import Record, read, read_position
from phalanx._comm.diagnostics.whereabouts import describe_end, find_position, has_finished, late_ranks, name_process
from phalanx._comm.symmetric_memory.memory import SymmetricMemory
from phalanx.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, PhalanxError


def failure(
    status: int, symm_mem: SymmetricMemory, group: str, timeout_s: float, *, kind: int = 0, peer: int = -1
) -> PhalanxError:
    """Return the error for `status`, with what the shared memory shows about every rank.

    The error names this rank's latest collective or, with `kind`, its latest message of that kind with `peer`, because
    other threads may have begun other operations meanwhile.
    """
    if status == CLOSED:
        return closed(group)
    mine = _own(read(symm_mem.core, symm_mem.rank), kind, peer)
    if mine is not None:
        operation = FailedOperation(mine.label, group, symm_mem.rank, mine.seq, mine.call_site)
    else:
        operation = FailedOperation(_forgotten(kind, peer), group, symm_mem.rank)
    return _report(status, symm_mem, timeout_s, mine).error(operation)


def status_of(error: PhalanxError) -> int:
    """Return the flight recorder's status of an operation that ended with `error`: the inverse of `failure`."""
    kinds = ((MismatchError, MISMATCH), (PeerLostError, PEER_LOST), (DeadlineError, DEADLINE), (ClosedError, CLOSED))
    return next((status for kind, status in kinds if isinstance(error, kind)), INVALID)


def _own(records: list[Record], kind: int, peer: int) -> Record | None:
    fits = (r for r in reversed(records) if (r.is_collective if kind == 0 else (r.kind, r.peer) == (kind, peer)))
    return next(fits, None)


def _forgotten(kind: int, peer: int) -> str:
    """Describe a message that took so long that the recorder has overwritten its record."""
    who = f"rank {peer}" if peer >= 0 else "any rank"
    return {SEND: f"send to {who}", RECV: f"recv from {who}"}.get(kind, "operation")


def _report(status: int, symm_mem: SymmetricMemory, timeout_s: float, mine: Record | None) -> FailureReport:
    who = symm_mem.core.poison()[1]
    if status == MISMATCH:
        return _mismatch(symm_mem, mine)
    if status == PEER_LOST:
        return _lost(symm_mem, who, mine)
    if status == DEADLINE:
        return _late(symm_mem, timeout_s, who, mine)
    if status == INTERRUPTED:
        reason = symm_mem.core.state(who)[5] or "a signal handler raised"
        positions = {who: read_position(symm_mem.core, who)}
        return FailureReport("interrupted", (who,), _processes(symm_mem, who), positions, reason=reason)
    if status == NO_MEMORY:
        return FailureReport("no memory", (who,), _processes(symm_mem, who))
    return FailureReport("internal", reason=f"the core answered {status}")


def _processes(symm_mem: SymmetricMemory, *ranks: int) -> dict[int, str]:
    return {rank: name_process(symm_mem, rank) for rank in ranks}


def _mismatch(symm_mem: SymmetricMemory, mine: Record | None) -> FailureReport:
    core = symm_mem.core
    records = [read(core, r) for r in range(symm_mem.world_size)]
    # A later call on the failed group reports the same failure: use the call that failed first.
    mine = next((r for r in records[symm_mem.rank] if r.status == MISMATCH), mine)
    if mine is None:
        return FailureReport("mismatch")
    if not mine.is_collective:
        calls = {symm_mem.rank: RankCall(mine.call())}
        peer = records[mine.peer] if mine.peer >= 0 else []
        sent = next((r for r in reversed(peer) if r.kind == SEND and r.peer == symm_mem.rank), None)
        if sent is not None:
            calls[mine.peer] = RankCall(sent.call())
        return FailureReport("mismatch", calls=calls, is_collective=False)
    calls = {r: _called(_counterpart(theirs, mine)) for r, theirs in enumerate(records)}
    earlier = describe_earlier_divergence(records, mine.seq)
    return FailureReport("mismatch", calls=calls, earlier=earlier)


def _called(record: Record | None) -> RankCall:
    return RankCall(record.call(), record.place) if record is not None else NOTHING_CALLED


def _counterpart(records: list[Record], mine: Record) -> Record | None:
    """Return the call that a rank made instead of `mine`: not its latest call if it continued after the error."""
    collectives = [r for r in reversed(records) if r.is_collective]
    for r in collectives:  # gradient rounds are numbered separately
        if r.seq == mine.seq and r.is_numbered_call == mine.is_numbered_call:
            return r
    stopped = (r for r in collectives if r.status == MISMATCH or r.leave_ns == 0)
    return next(stopped, collectives[0] if collectives else None)


def _lost(symm_mem: SymmetricMemory, who: int, mine: Record | None) -> FailureReport:
    core = symm_mem.core
    alone = ""
    if mine is not None and mine.is_collective and has_finished(symm_mem, who):
        missing = late_ranks(core, symm_mem.rank, symm_mem.world_size)
        if who in missing:  # otherwise it joined this operation, and left during it
            gone = [r for r in missing if has_finished(symm_mem, r)]
            behind = {r: str(find_position(symm_mem, r)) for r in missing if r not in gone}
            came = [r for r in range(symm_mem.world_size) if r not in missing]
            alone = describe_left_alone(mine.place, came, gone, behind)
    return FailureReport(
        "lost",
        (who,),
        _processes(symm_mem, who),
        {who: read_position(core, who)},
        reason=describe_end(symm_mem, who),
        remarks=(alone,) if alone else (),
    )


def _late(symm_mem: SymmetricMemory, timeout_s: float, who: int, mine: Record | None) -> FailureReport:
    core = symm_mem.core
    if mine and mine.name == "gradients":
        missing = [core.failed_rank] if who == symm_mem.rank and core.failed_rank >= 0 else []
    elif mine and not mine.is_collective:
        missing = [mine.peer] if mine.peer >= 0 else []
    else:
        missing = late_ranks(core, symm_mem.rank, symm_mem.world_size)
    return FailureReport(
        "late",
        tuple(missing),
        _processes(symm_mem, *missing),
        {r: find_position(symm_mem, r) for r in missing},
        timeout_s=timeout_s if who == symm_mem.rank else 0.0,
        waiter=who,
        is_collective=mine is not None and mine.is_collective,
    )
