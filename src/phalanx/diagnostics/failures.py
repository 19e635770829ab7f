"""From a status of the core to the error that a user reads: who, where, why, and what to do."""

from __future__ import annotations

import signal

from phalanx import _core
from phalanx.coordination.bootstrap import ranks
from phalanx.diagnostics.absence import JOIN_ADVICE, tell_absence
from phalanx.diagnostics.divergence import ADVICE, tell_earlier_parting, tell_left_alone, tell_parting
from phalanx.diagnostics.flight_recorder import Record, describe_position, read
from phalanx.diagnostics.misuse import closed as closed
from phalanx.diagnostics.misuse import nested as nested
from phalanx.diagnostics.whereabouts import whereabouts
from phalanx.errors import ClosedError, DeadlineError, InternalError, MismatchError, PeerLostError, PhalanxError
from phalanx.symmetric_memory.memory import SymmetricMemory
from phalanx.symmetric_memory.watch import wait_status

# enum plx_status
OK, MISMATCH, PEER_LOST, DEADLINE, INTERRUPTED, INVALID, NO_MEMORY, CLOSED, APART, REJOIN = range(10)
_LEFT = 2  # enum plx_life
SEND, RECV = 10, 11  # enum plx_kind

_OVER = "The group can no longer be used."
QUIET_END = "it ended without destroy_process_group"
"""The last words of a process that ended by itself, well or with an exit code of its own choice."""


def failure(
    status: int, symm_mem: SymmetricMemory, group: str, timeout_s: float, *, kind: int = 0, peer: int = -1
) -> PhalanxError:
    """The error for `status`, told from what the shared memory says of every rank.

    The operation is this rank's latest collective, or with `kind` its latest message of that kind with `peer`: other
    threads may have begun something else meanwhile.
    """
    core = symm_mem.core
    if status == CLOSED:
        return closed(group)
    mine = _own(read(core, symm_mem.rank), kind, peer)
    here = f"{mine.label if mine else _forgotten(kind, peer)} in group {group!r} on rank {symm_mem.rank}"
    if status == MISMATCH:
        return _mismatch(symm_mem, here, mine)
    if status == PEER_LOST:
        return _peer_lost(symm_mem, here, core.poison()[1], mine)
    if status == DEADLINE:
        return _deadline(symm_mem, here, timeout_s, core.poison()[1], mine)
    if status == INTERRUPTED:
        who = core.poison()[1]
        return PeerLostError(
            f"{here}: rank {who} was interrupted ({core.state(who)[5] or 'a signal handler raised'}) while the group "
            f"waited; it {describe_position(core, who)}.\n{_OVER}",
            ranks=(who,),
        )
    if status == NO_MEMORY:
        return PhalanxError(f"{here}: rank {core.poison()[1]} had no memory for a message that came early. {_OVER}")
    return InternalError(f"{here}: the core answered {status}. Please report this with the program that shows it.")


def status_of(error: PhalanxError) -> int:
    """The opposite of `failure`, as far as it goes: what the flight recorder says of an operation that ended so."""
    kinds = ((MismatchError, MISMATCH), (PeerLostError, PEER_LOST), (DeadlineError, DEADLINE), (ClosedError, CLOSED))
    return next((status for kind, status in kinds if isinstance(error, kind)), INVALID)


def _own(records: list[Record], kind: int, peer: int) -> Record | None:
    fits = (r for r in reversed(records) if (r.is_collective if kind == 0 else (r.kind, r.peer) == (kind, peer)))
    return next(fits, None)


def _forgotten(kind: int, peer: int) -> str:
    """A receive may be posted for so long that the recorder's line for it is another's by now."""
    who = f"rank {peer}" if peer >= 0 else "any rank"
    return {SEND: f"send to {who}", RECV: f"recv from {who}"}.get(kind, "operation")


def _same_turn(records: list[Record], mine: Record) -> Record | None:
    """What a rank called when we called `mine`: not simply its latest, for it may have caught the error and gone on."""
    collectives = [r for r in reversed(records) if r.is_collective]
    for r in collectives:  # rounds of gradients are counted apart
        if r.seq == mine.seq and r.is_numbered_call == mine.is_numbered_call:
            return r
    stopped = (r for r in collectives if r.status == MISMATCH or r.leave_ns == 0)
    return next(stopped, collectives[0] if collectives else None)


def _mismatch(symm_mem: SymmetricMemory, here: str, mine: Record | None) -> MismatchError:
    records = [read(symm_mem.core, r) for r in range(symm_mem.world_size)]
    # A call on a group that is over repeats what ended it.
    mine = next((r for r in records[symm_mem.rank] if r.status == MISMATCH), mine)
    calls: dict[int, str] = {}
    parting = ""
    if mine is None:
        pass
    elif mine.is_collective:
        made = {r: _same_turn(theirs, mine) for r, theirs in enumerate(records)}
        calls = {r: call.call() if call is not None else "nothing yet" for r, call in made.items()}
        parting = tell_parting(made)
        if parting and (earlier := tell_earlier_parting(records, mine.seq)):
            parting = f"{parting}\n{earlier}"
    else:
        peer = records[mine.peer] if mine.peer >= 0 else []
        sent = next((r for r in reversed(peer) if r.kind == SEND and r.peer == symm_mem.rank), None)
        calls[symm_mem.rank] = mine.call()
        if sent is not None:
            calls[mine.peer] = sent.call()
    lines = "\n".join(f"  rank {r}: {call}" for r, call in calls.items())
    # A round of gradients has no gate at its beginning: buckets that all ranks had are averaged already.
    in_round = any(call.startswith("gradients") for call in calls.values())
    # Whoever finds the root's call the same as its own copies, and does not wait for what the others call.
    is_early = any(call.startswith("broadcast_buffers") for call in calls.values())
    changed = "no tensor was changed"
    if in_round:
        changed = "some gradients may be averaged already"
    elif is_early:
        changed = "some buffers may be the root's already"
    absence = tell_absence(symm_mem.core.absent, symm_mem.core.missed)
    short_of_data = f"If a rank has run out of data: {JOIN_ADVICE}" if in_round and not absence else ""
    advice = "Make every rank call the same operation with the same dtype, size and options, in the same order."
    told = [f"{here}: the ranks called different things; {changed}.", lines, absence, short_of_data, parting, advice]
    if parting:
        told.append(ADVICE)
    return MismatchError("\n".join(filter(None, told)) + f" {_OVER}", calls=calls)


def _peer_lost(symm_mem: SymmetricMemory, here: str, who: int, mine: Record | None) -> PeerLostError:
    core = symm_mem.core
    alone = ""
    if mine is not None and mine.is_collective and _ended_well(symm_mem, who):
        missing = late(core, symm_mem.rank, symm_mem.world_size)
        if who in missing:  # else it came to this operation, and left in the middle of it
            gone = [r for r in missing if _ended_well(symm_mem, r)]
            behind = {r: whereabouts(symm_mem, r) for r in missing if r not in gone}
            came = [r for r in range(symm_mem.world_size) if r not in missing]
            alone = f"\n{tell_left_alone(mine, came, gone, behind)}\n{ADVICE}"
    return PeerLostError(
        f"{here}: rank {who} ({_process(symm_mem, who)}) is gone: {how_it_ended(symm_mem, who)}.\n"
        f"It {describe_position(core, who)}. "
        f"Read its log first.{alone} {_OVER}",
        ranks=(who,),
    )


def _ended_well(symm_mem: SymmetricMemory, rank: int) -> bool:
    """Whether a rank has left, or its process has ended, because its program was over."""
    life, _, _, _, _, note = symm_mem.core.state(rank)
    if note or life == _LEFT:
        return note in ("", QUIET_END)
    return not symm_mem.core.alive(rank) and wait_status(symm_mem.process_of(rank)) == 0


def _process(symm_mem: SymmetricMemory, who: int) -> str:
    theirs, ours = symm_mem.process_of(who), symm_mem.process_of(symm_mem.rank)
    return f"pid {theirs.pid}" + (" in another pid namespace" if theirs.namespace != ours.namespace else "")


def how_it_ended(symm_mem: SymmetricMemory, who: int) -> str:
    """How a rank's process ended, from the best witness that there is."""
    life, _, _, _, _, note = symm_mem.core.state(who)
    if note:
        return note
    if life == _LEFT:
        return "it left the group (destroy_process_group)"
    status = wait_status(symm_mem.process_of(who))
    if status is None:
        return "it ended without a word (killed, or crashed)"
    if status & 0x7F:
        number = status & 0x7F
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return f"killed by {name}"
    return f"it exited with code {status >> 8}"


def _deadline(symm_mem: SymmetricMemory, here: str, timeout_s: float, who: int, mine: Record | None) -> DeadlineError:
    core = symm_mem.core
    if mine and mine.name == "gradients":
        missing = [core.culprit] if who == symm_mem.rank else []
    elif mine and not mine.is_collective:
        missing = [mine.peer] if mine.peer >= 0 else []
    else:
        missing = late(core, symm_mem.rank, symm_mem.world_size)
    span = f" within {timeout_s:.1f} s" if who == symm_mem.rank else f"; rank {who} gave up waiting"
    said = f"no answer from {ranks(missing)}{span}" if missing else f"time ran out{span}"
    lines = "\n".join(f"Rank {r} {whereabouts(symm_mem, r)}." for r in missing)
    advice = "Read the log of the missing rank first; if it is only slow, raise the timeout of the group."
    unreached = ADVICE if missing and mine and mine.is_collective else ""
    told = (f"{here}: {said}.", lines, advice, unreached)
    return DeadlineError("\n".join(filter(None, told)) + f" {_OVER}", missing=tuple(missing))


def late(core: _core.Group, rank: int, world_size: int) -> list[int]:
    """The ranks that have not come as far as `rank` has."""
    mine = core.state(rank)[3]
    return [r for r in range(world_size) if core.state(r)[3] < mine]
