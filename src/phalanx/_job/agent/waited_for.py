"""Find the rank for which the others wait: one that does not come, or one that always comes last.

The functions are pure: they read what was written.

    rank 0   ─────┤ in all_reduce #7 ………………………… now
    rank 1   ─────┤ in all_reduce #7 ………………………… now
    rank 2   ──────── (not in any operation) ……… now        silent: since ranks 0 and 1 came, or its own last sign

A rank that waits itself is not the one that is waited for, unless its process is stopped, or in a system call that
cannot be interrupted: then it may hold up the very operation in which it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx._base.core_numbers import GRADIENTS
from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog

STANDING = "TtD"  # letters of /proc/PID/stat: stopped, in a debugger, in a system call that cannot be interrupted
_MOSTLY = 0.8  # a rank that is called slower comes last to at least this share of the operations
_COSTLY = 0.1  # the others wait for it during at least this share of the time
_FEW = 50  # fewer operations say nothing about who is slow


@dataclass(frozen=True)
class Silent:
    """A `Silent` is a process that others wait for: for how long, and in which operation."""

    pid: int
    silent_s: float
    waiting: tuple[int, ...]  # processes
    operation: str  # empty if only the process's state tells


def find_silent(
    groups: Sequence[GroupLog],
    pids: Collection[int],
    standing_ns: Mapping[int, int],
    last_step_ns: Mapping[int, int],
    now_ns: int,
) -> list[Silent]:
    """Return the processes among `pids` that others wait for, the longest silence first.

    Arguments:
        groups: what the ranks have recorded.
        standing_ns: since when processes have been seen in one of the states `STANDING`.
        last_step_ns: when processes have last completed a step, where that is known.
    """
    # of a group that has lost a member nobody waits any more: what it holds is history
    groups = [group for group in groups if all(rank.pid in pids for rank in group.ranks)]
    signs = _last_signs(groups, last_step_ns)
    running = _running(groups)
    found: dict[int, Silent] = {}
    for group in groups:
        for (counted, seq), inside in _waits(group, pids).items():
            began_ns = min(record.enter_ns for record in inside.values())
            for member in group.ranks:
                if member.pid not in pids or member.left or not member.came:
                    continue
                waiters = [record for pid, record in inside.items() if pid not in standing_ns]
                has_come = _has_come(member.records, counted, seq, waiters)
                if member.pid in standing_ns:
                    others = [r.enter_ns for pid, r in inside.items() if pid != member.pid]
                    if not others or (has_come and member.pid not in inside):
                        continue
                    since_ns = max(standing_ns[member.pid], min(others))
                elif has_come or member.pid in running:
                    continue
                else:
                    since_ns = max(began_ns, signs.get(member.pid, 0))
                waiting = tuple(pid for pid in inside if pid != member.pid)
                operation = next(record.place for pid, record in inside.items() if pid in waiting)
                silent = Silent(member.pid, max(0, now_ns - since_ns) / 1e9, waiting, operation)
                if member.pid not in found or found[member.pid].silent_s < silent.silent_s:
                    found[member.pid] = silent
    newest_ns = max(signs.values(), default=0)
    for pid, since_ns in standing_ns.items():
        if pid in pids and pid not in found and not running:  # no recorder tells of waiting; and nobody does anything
            found[pid] = Silent(pid, max(0, now_ns - max(since_ns, newest_ns)) / 1e9, (), "")
    return sorted(found.values(), key=lambda silent: -silent.silent_s)


def _counter(record: Record) -> str:
    """Return what the operation is counted in: rounds of gradients have numbers of their own."""
    return "gradients" if record.kind == GRADIENTS else "calls"


def _has_come(records: Sequence[Record], counted: str, seq: int, waiters: Sequence[Record]) -> bool:
    """Return whether the process with these records has come to an operation in which `waiters` are.

    Rounds of gradients are counted by each reducer: of those of another, or of an earlier one (a wrapper makes another
    after its first step), with such a number it had left the last one before the others came.
    """
    came = (record for record in records if _counter(record) == counted and record.seq >= seq)
    if counted == "calls" or not waiters:
        return any(came)
    latest_ns = max(record.enter_ns for record in waiters)
    return any(record.leave_ns == 0 or record.leave_ns >= latest_ns for record in came)


def _running(groups: Sequence[GroupLog]) -> set[int]:
    return {rank.pid for group in groups for rank in group.ranks if any(r.leave_ns == 0 for r in rank.records)}


def _last_signs(groups: Sequence[GroupLog], last_step_ns: Mapping[int, int]) -> dict[int, int]:
    signs = dict(last_step_ns)
    for group in groups:
        for rank in group.ranks:
            for record in rank.records[-1:]:
                signs[rank.pid] = max(signs.get(rank.pid, 0), record.enter_ns, record.leave_ns)
    return signs


def _waits(group: GroupLog, pids: Collection[int]) -> dict[tuple[str, int], dict[int, Record]]:
    """Return the collectives of the group in which a process is, with those processes."""
    waits: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for rank in group.ranks:
        for record in rank.records:
            if record.leave_ns == 0 and record.is_collective and rank.pid in pids:
                waits[_counter(record), record.seq][rank.pid] = record
    return waits


@dataclass(frozen=True)
class Slow:
    """A `Slow` process comes last: to how many operations, and for which share of the time the others waited."""

    pid: int
    times: int
    num_operations: int
    share: float
    span_s: float


class LatenessCounter:
    """`LatenessCounter` counts who came last to the operations since the beginning. Feed it with looks that overlap."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, tuple[int, ...], str], int] = {}  # by group: the latest number that was counted
        self._times: dict[int, int] = defaultdict(int)
        self._lead_ns: dict[int, int] = defaultdict(int)
        self._num_operations = 0
        self._span_ns = 0

    def add(self, groups: Sequence[GroupLog]) -> None:
        """Count the operations that are new, and to which all ranks of a group have come."""
        seen_ns: list[int] = []
        for group in groups:
            pids = tuple(rank.pid for rank in group.ranks)
            if len(pids) < group.world_size or len(pids) < 2:
                continue  # the others are on other hosts
            entered: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
            for rank in group.ranks:
                for record in rank.records:
                    if record.is_collective:
                        # each reducer counts its rounds: the first one's, as not all may be in the second one's yet
                        entered[_counter(record), record.seq].setdefault(rank.pid, record.enter_ns)
            for (counted, seq), times in sorted(entered.items()):
                key = (group.name, pids, counted)
                if len(times) < len(pids) or seq <= self._counted.get(key, -1):
                    continue
                self._counted[key] = seq
                *_, (before_ns, _), (last_ns, pid) = sorted((at, pid) for pid, at in times.items())
                seen_ns.append(last_ns)
                self._num_operations += 1
                self._times[pid] += 1
                self._lead_ns[pid] += last_ns - before_ns
        if seen_ns:
            self._span_ns += max(seen_ns) - min(seen_ns)

    def find_slow(self) -> Slow | None:
        """Return the process that is constantly slower than the others, if one is."""
        if self._num_operations < _FEW:
            return None
        pid = max(self._times, key=self._times.__getitem__)
        span_ns = max(1, self._span_ns)
        share = self._lead_ns[pid] / span_ns
        if self._times[pid] < _MOSTLY * self._num_operations or share < _COSTLY:
            return None
        return Slow(pid, self._times[pid], self._num_operations, share, span_ns / 1e9)
