"""Watch the ranks while they run: a rank that keeps the others waiting is reported, or killed.

every few seconds    states of processes, pages of progress, flight recorders     nothing is asked of a rank
somebody is silent   ask it for its Python stack, wait half a second
then                 say who waits for whom, where it is; with --evict-after: kill it
"""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx._base.core_numbers import GRADIENTS
from phalanx._base.processes import STACKS_SIGNAL, read_state
from phalanx._comm.diagnostics.flight_recorder import Record, position_of
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.inspect.stacks.dump import without_launcher

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt

_LOOK_S = 15.0
_QUICKEST_LOOK_S = 0.1
_LOOKS_IN_TIME = 5  # a silent rank is killed only after so many checks
_ANSWER_S = 0.5  # a rank writes its stack within a millisecond, unless it cannot
_TELL_AFTER_S = (60.0, 600.0, 3600.0)
_SLOW_AFTER_S = 60.0
_MAX_STACK_BYTES = 1 << 16


@dataclass(frozen=True)
class AccusedRank:
    """An `AccusedRank` is a rank that keeps the others waiting; it writes a requested stack after `offset`."""

    rank: int
    pid: int
    silent: Silent
    offset: int
    due: float
    evict: bool


class RankWatch:
    """A `RankWatch` watches the ranks of one attempt. `evict_after_s` is None if silent ranks are not killed."""

    def __init__(self, evict_after_s: float | None, now: float) -> None:
        self._evict_after_s = evict_after_s
        self._period_s = _LOOK_S
        if evict_after_s is not None:
            self._period_s = min(_LOOK_S, max(_QUICKEST_LOOK_S, evict_after_s / _LOOKS_IN_TIME))
        self._next_look = now + self._period_s
        self._standing: dict[int, int] = {}  # by process: since when it is in such a state (ns)
        self._told: dict[int, int] = {}  # by process: how often it was reported in this silence
        self._accused: dict[int, AccusedRank] = {}  # by rank: the accusation
        self._lateness = LatenessCounter()
        self._slow_told = False
        self._slow_due = now + _SLOW_AFTER_S

    @property
    def next_due(self) -> float:
        """Return when `look` or `judge` must next be called."""
        return min([self._next_look, *(accused.due for accused in self._accused.values())])

    def is_due(self, now: float) -> bool:
        return now >= self._next_look

    def look(
        self,
        pids: Mapping[int, int],
        groups: Sequence[GroupLog],
        steps_ns: Mapping[int, int],
        stacks: Mapping[int, int],
        now: float,
    ) -> list[AccusedRank]:
        """Look at the ranks (`pids`); return those that must be asked for their stacks (descriptors by rank)."""
        self._next_look = now + self._period_s
        now_ns = time.monotonic_ns()
        states = {pid: read_state(pid) for pid in pids.values()}
        standing = [pid for pid, state in states.items() if state and state in STANDING]
        self._standing = {pid: self._standing.get(pid, now_ns) for pid in standing}
        self._lateness.add(groups)
        silents = find_silent(groups, set(pids.values()), self._standing, steps_ns, now_ns)
        rank_of = {pid: rank for rank, pid in pids.items()}
        self._told = {pid: times for pid, times in self._told.items() if pid in {s.pid for s in silents}}
        new = []
        for silent in silents:
            rank = rank_of[silent.pid]
            times = self._told.get(silent.pid, 0)
            evict = (
                self._evict_after_s is not None
                and silent.silent_s >= self._evict_after_s
                and states[silent.pid] != "t"  # under a debugger
            )
            tell = times < len(_TELL_AFTER_S) and silent.silent_s >= _TELL_AFTER_S[times]
            if rank in self._accused or not (evict or tell) or (not evict and not silent.waiting):
                continue
            self._told[silent.pid] = times + 1
            offset = os.fstat(stacks[rank]).st_size if rank in stacks else 0
            self._accused[rank] = AccusedRank(rank, silent.pid, silent, offset, now + _ANSWER_S, evict)
            new.append(self._accused[rank])
        return new

    def judge(
        self, pids: Mapping[int, int], groups: Sequence[GroupLog], steps_ns: Mapping[int, int], now: float
    ) -> list[AccusedRank]:
        """Return the accused whose time to answer is over and which are still silent; they are accused no more."""
        due = [accused for accused in self._accused.values() if now >= accused.due]
        for accused in due:
            del self._accused[accused.rank]
        if not due:
            return []
        found = find_silent(groups, set(pids.values()), self._standing, steps_ns, time.monotonic_ns())
        silents = {silent.pid: silent for silent in found}
        return [
            replace(accused, silent=silents[accused.pid])
            for accused in due
            if accused.pid in silents and silents[accused.pid].silent_s >= accused.silent.silent_s
        ]

    def find_slow(self, now: float) -> Slow | None:
        """Return a process that is constantly slower than the others; each is returned once."""
        if self._slow_told or now < self._slow_due:
            return None
        self._slow_due = now + _SLOW_AFTER_S
        slow = self._lateness.find_slow()
        self._slow_told = slow is not None
        if slow is None:
            self._lateness = LatenessCounter()
        return slow


class SilentRanks:
    """`SilentRanks` looks at the ranks of one attempt on this host every few seconds."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._watch = RankWatch(attempt.plan.settings.evict_after_s, time.monotonic())
        self.evicted: dict[int, str] = {}  # by process: why it was killed

    @property
    def due(self) -> float:
        """Return when to look next."""
        return self._watch.next_due

    def look(self, now: float) -> None:
        """Find the ranks that others wait for. This costs some milliseconds of this process, every few seconds."""
        attempt, watch = self._attempt, self._watch
        known = attempt.ranks.processes.pids
        pids = {rank: known[rank] for rank in sorted(known) if attempt.state.is_running(rank)}
        groups, steps_ns = attempt.flights.logs(), {pid: at for pid in pids.values() if (at := self._last_step_ns(pid))}
        if watch.is_due(now):
            for accused in watch.look(pids, groups, steps_ns, attempt.ranks.processes.stacks, now):
                attempt.send_signal(STACKS_SIGNAL, (accused.rank,), group=False)
            slow = watch.find_slow(now)
            rank = next((rank for rank, pid in pids.items() if slow is not None and pid == slow.pid), None)
            if slow is not None and rank is not None:
                attempt.host.display.print(describe_slow(slow, rank))
        for accused in watch.judge(pids, groups, steps_ns, now):
            if known.get(accused.rank) == accused.pid:
                self._sentence(accused, groups)

    def _last_step_ns(self, pid: int) -> int:
        """Return when the process has last completed a step; 0 if it reports none."""
        progress = self._attempt.pages.read(pid)
        tracks = (progress.loop, progress.state) if progress is not None else ()
        return max((track.recent[-1][0] for track in tracks if track is not None), default=0)

    def _sentence(self, accused: AccusedRank, groups: Sequence[GroupLog]) -> None:
        """Report a rank that keeps the others waiting, and kill it if requested."""
        attempt, evict_after_s = self._attempt, self._attempt.plan.settings.evict_after_s
        rank_of = {pid: rank for rank, pid in attempt.ranks.processes.pids.items()}
        text = describe_wait(accused, rank_of, groups)
        stack = read_stack(attempt.ranks.processes.stacks[accused.rank], accused.offset)
        told = f"phalanx run: {text}" + (f"\n{textwrap.indent(stack.rstrip(), '  ')}" if stack else "")
        if not accused.evict:
            attempt.host.display.print(f"{told}\n--evict-after SECONDS would kill it.")
            return
        why = f"the others waited for it for {accused.silent.silent_s:.1f} s"
        if not accused.silent.waiting:
            why = f"it had done nothing for {accused.silent.silent_s:.1f} s"
        why += f" (--evict-after {evict_after_s:g})"
        if attempt.elastic.claims(accused.rank, accused.pid):
            if not attempt.elastic.is_evicted(accused.pid):  # else the zygote, or the kernel, takes its time to end it
                attempt.host.display.print(told)
            attempt.do_elastic(attempt.elastic.evict(accused.rank, why, time.monotonic()))
        else:
            self.evicted[accused.pid] = f"It was killed: {text} (--evict-after).\n\n{stack}".rstrip()
            attempt.send_signal(signal.SIGKILL, (accused.rank,), group=True)


def read_stack(fd: int, offset: int) -> str:
    """Return the stacks that a rank wrote since `offset`; empty if it did not answer."""
    data = os.pread(fd, _MAX_STACK_BYTES, offset if os.fstat(fd).st_size >= offset else 0)
    return without_launcher(data.decode(errors="replace"))


def describe_wait(accused: AccusedRank, rank_of: Mapping[int, int], groups: Sequence[GroupLog]) -> str:
    """Return in words who waits for whom, since when, and where that rank is."""
    silent = accused.silent
    waiting = sorted(rank_of[pid] for pid in silent.waiting if pid in rank_of)
    who = f"rank {accused.rank} (pid {accused.pid})"
    where = "; ".join(filter(None, describe_process(accused.pid, groups)))
    if waiting:
        return (
            f"{name_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for {who} in {silent.operation}, "
            f"for {silent.silent_s:.1f} s: it is {where}"
        )
    return f"{who} has done nothing for {silent.silent_s:.1f} s: it is {where}"


def describe_slow(slow: Slow, rank: int) -> str:
    """Describe the cost of a rank that is slower than the others."""
    return (
        f"phalanx run: rank {rank} (pid {slow.pid}) is slower than the others: in {slow.span_s:.0f} s it came last "
        f"to {slow.times} of {slow.num_operations} operations, and for {slow.share * 100:.0f} % of the time they "
        "waited for it alone. `phalanx top` shows it, `phalanx stacks` where it is"
    )


# Find the rank for which the others wait: one that does not enter an operation, or always enters last.
#
# The functions are pure: they read records.
#
#     rank 0   ─────┤ in all_reduce #7 ………………………… now
#     rank 1   ─────┤ in all_reduce #7 ………………………… now
#     rank 2   ──────── (not in any operation) ……… now        silent: since ranks 0 and 1 came, or its own last sign
#
# A rank that waits itself is not the one that is waited for, unless its process is stopped, or in a system call that
# cannot be interrupted: then it may hold up the very operation in which it is.

STANDING = "TtD"  # letters of /proc/PID/stat: stopped, in a debugger, in a system call that cannot be interrupted
_MOSTLY = 0.8  # a rank that is called slower comes last to at least this share of the operations
_COSTLY = 0.1  # the others wait for it during at least this share of the time
_FEW = 50  # fewer operations do not show who is slow


@dataclass(frozen=True)
class Silent:
    """A `Silent` is a process that others wait for: for how long, and in which operation."""

    pid: int
    silent_s: float
    waiting: tuple[int, ...]  # processes
    operation: str  # empty if only the process's state shows it


def find_silent(
    groups: Sequence[GroupLog],
    pids: Collection[int],
    standing_ns: Mapping[int, int],
    last_step_ns: Mapping[int, int],
    now_ns: int,
) -> list[Silent]:
    """Return the processes among `pids` that others wait for, the longest silence first.

    Arguments:
        groups: the logs of the ranks.
        standing_ns: since when processes have been in one of the states `STANDING`.
        last_step_ns: when processes have last completed a step, if known.
    """
    # no rank waits any more in a group that has lost a member: its log is history
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
        if pid in pids and pid not in found and not running:  # no recorder reports waiting, and no process is active
            found[pid] = Silent(pid, max(0, now_ns - max(since_ns, newest_ns)) / 1e9, (), "")
    return sorted(found.values(), key=lambda silent: -silent.silent_s)


def _counter(record: Record) -> str:
    """Return the name of the counter for an operation: gradient rounds are counted separately."""
    return "gradients" if record.kind == GRADIENTS else "calls"


def _has_come(records: Sequence[Record], counted: str, seq: int, waiters: Sequence[Record]) -> bool:
    """Return whether the process with these records has entered an operation in which `waiters` are.

    Each reducer counts its own gradient rounds. A record with this number may belong to another reducer, or to an
    earlier one (a wrapper makes a new one after its first step), if it left its last round before the others entered.
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
    """A `Slow` process is the last one: in how many operations, and for which share of the others' waiting time."""

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
        """Return the process that is constantly slower than the others, if there is one."""
        if self._num_operations < _FEW:
            return None
        pid = max(self._times, key=self._times.__getitem__)
        span_ns = max(1, self._span_ns)
        share = self._lead_ns[pid] / span_ns
        if self._times[pid] < _MOSTLY * self._num_operations or share < _COSTLY:
            return None
        return Slow(pid, self._times[pid], self._num_operations, share, span_ns / 1e9)


# Describe the ranks that remain after others have ended: their state, and their last operation.

_MAX_LINES = 12

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted (a disk or a network file system?)",
    "T": "stopped (SIGSTOP or Ctrl-Z); `kill -CONT {pid}` lets it go on",
    "t": "stopped by a debugger",
    "Z": "ended, and about to be noticed",
}


def describe_stragglers(
    pids: Mapping[int, int],
    ranks: Sequence[int],
    world_size: int,
    waited_s: float,
    groups: Sequence[GroupLog],
    local_ranks: range,
) -> str:
    """Return a line for each of `ranks`, whose processes are `pids`; `groups` are their logs.

    For a rank outside of `local_ranks` the line only says that it is on another host.
    """
    gone = world_size - len(ranks)
    lines = [f"phalanx run: {gone} of {world_size} ranks have ended; still there {waited_s:.1f} s later:"]
    for rank in ranks[:_MAX_LINES]:
        pid = pids.get(rank)
        absent = "not started yet" if rank in local_ranks else "on another host"
        said = describe_process(pid, groups) if pid is not None else (absent,)
        lines.append(f"  rank {rank}" + (f" (pid {pid})" if pid else "") + ": " + "; ".join(filter(None, said)))
    if len(ranks) > _MAX_LINES:
        lines.append(f"  … and {len(ranks) - _MAX_LINES} more")
    return "\n".join(lines)


def describe_process(pid: int, groups: Sequence[GroupLog]) -> tuple[str, str]:
    """Return the system's and the recorder's information on a process; empty if there is none."""
    return _STATES.get(read_state(pid), "").format(pid=pid), _describe_last(pid, groups)


def _describe_last(pid: int | None, groups: Sequence[GroupLog]) -> str:
    """Return the last place that the recorder saw the process at, in any group; empty if there is none."""
    logs = [log.records for group in groups for log in group.ranks if log.pid == pid and log.records]
    if not logs:
        return ""
    return str(position_of(max(logs, key=lambda records: records[-1].enter_ns), time.monotonic_ns()))
