"""Watch the running ranks: report or kill a rank that makes the others wait.

every few seconds    read process states, progress pages and flight recorders, without any work in the ranks
a rank is silent     request its Python stack, and wait half a second
then                 report which ranks wait for it, and its stack; with --evict-after: kill it
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

_CHECK_S = 15.0
_MIN_CHECK_S = 0.1
_PAUSE_S = 1.0
_CHECKS_BEFORE_EVICTION = 5  # checks within `evict_after_s`, if the limits of the period allow as many
_ANSWER_S = 0.5  # a rank that can write its stack does so within a millisecond
_REPORT_AFTER_S = (60.0, 600.0, 3600.0)
_SLOW_AFTER_S = 60.0
_MAX_STACK_BYTES = 1 << 16


@dataclass(frozen=True)
class SuspectedRank:
    """A `SuspectedRank` is a rank that may make the others wait.

    Its requested stack begins at byte `offset` of the file for its stacks.
    """

    rank: int
    pid: int
    silent: SilentProcess
    offset: int
    due: float
    evict: bool


class RankWatch:
    """A `RankWatch` watches the ranks of one attempt. `evict_after_s` is None if silent ranks are not killed."""

    def __init__(self, evict_after_s: float | None, now: float) -> None:
        self._evict_after_s = evict_after_s
        self._period_s = _CHECK_S
        if evict_after_s is not None:
            self._period_s = min(_CHECK_S, max(_MIN_CHECK_S, evict_after_s / _CHECKS_BEFORE_EVICTION))
        self._next_check = now + self._period_s
        self._resumed_ns = 0  # when this process and the ranks last continued after being suspended
        self._stuck_since_ns: dict[int, int] = {}  # by process: when it was first seen in a state of STUCK_STATES
        self._num_reports: dict[int, int] = {}  # by process: the number of reports in this silence
        self._suspects: dict[int, SuspectedRank] = {}  # by rank
        self._lateness = LatenessCounter()
        self._slow_reported = False
        self._slow_due = now + _SLOW_AFTER_S

    @property
    def next_due(self) -> float:
        """Return when `check` or `confirm` must next be called."""
        return min([self._next_check, *(suspect.due for suspect in self._suspects.values())])

    def is_due(self, now: float) -> bool:
        return now >= self._next_check

    def check(
        self,
        pids: Mapping[int, int],
        groups: Sequence[GroupLog],
        steps_ns: Mapping[int, int],
        stacks: Mapping[int, int],
        now: float,
    ) -> list[SuspectedRank]:
        """Check the ranks; return new suspects, whose stacks the caller must request.

        If this call is late by more than a period and more than a busy host explains (`_PAUSE_S`), the job was
        suspended (Ctrl-Z, a paused container), and the time of every silence is counted from now.

        `pids`: the processes by rank. `steps_ns`: when each process last completed a step. `stacks`: the descriptors of
        the files for the stacks, by rank.
        """
        now_ns = time.monotonic_ns()
        if now > self._next_check + max(self._period_s, _PAUSE_S):
            self._resumed_ns = now_ns
        self._next_check = now + self._period_s
        states = {pid: read_state(pid) for pid in pids.values()}
        stuck = [pid for pid, state in states.items() if state and state in STUCK_STATES]
        self._stuck_since_ns = {pid: self._stuck_since_ns.get(pid, now_ns) for pid in stuck}
        self._lateness.add(groups)
        silents = find_silent(groups, set(pids.values()), self._stuck_since_ns, steps_ns, now_ns, self._resumed_ns)
        rank_of = {pid: rank for rank, pid in pids.items()}
        self._num_reports = {pid: times for pid, times in self._num_reports.items() if pid in {s.pid for s in silents}}
        new = []
        for silent in silents:
            rank = rank_of[silent.pid]
            times = self._num_reports.get(silent.pid, 0)
            evict = (
                self._evict_after_s is not None
                and silent.silent_s >= self._evict_after_s
                and states[silent.pid] != "t"  # under a debugger
            )
            report = times < len(_REPORT_AFTER_S) and silent.silent_s >= _REPORT_AFTER_S[times]
            if rank in self._suspects or not (evict or report) or (not evict and not silent.waiting):
                continue
            self._num_reports[silent.pid] = times + 1
            offset = os.fstat(stacks[rank]).st_size if rank in stacks else 0
            self._suspects[rank] = SuspectedRank(rank, silent.pid, silent, offset, now + _ANSWER_S, evict)
            new.append(self._suspects[rank])
        return new

    def confirm(
        self, pids: Mapping[int, int], groups: Sequence[GroupLog], steps_ns: Mapping[int, int], now: float
    ) -> list[SuspectedRank]:
        """Remove the suspects that are due; return those that are still silent."""
        due = [suspect for suspect in self._suspects.values() if now >= suspect.due]
        for suspect in due:
            del self._suspects[suspect.rank]
        if not due:
            return []
        now_ns = time.monotonic_ns()
        found = find_silent(groups, set(pids.values()), self._stuck_since_ns, steps_ns, now_ns, self._resumed_ns)
        silents = {silent.pid: silent for silent in found}
        return [
            replace(suspect, silent=silents[suspect.pid])
            for suspect in due
            if suspect.pid in silents and silents[suspect.pid].silent_s >= suspect.silent.silent_s
        ]

    def find_slow(self, now: float) -> SlowProcess | None:
        """Return a process that is consistently slower than the others, at most once per attempt; None otherwise."""
        if self._slow_reported or now < self._slow_due:
            return None
        self._slow_due = now + _SLOW_AFTER_S
        slow = self._lateness.find_slow()
        self._slow_reported = slow is not None
        if slow is None:
            self._lateness = LatenessCounter()
        return slow


class SilentRanks:
    """`SilentRanks` checks the ranks of one attempt on this host every few seconds."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._watch = RankWatch(attempt.plan.settings.evict_after_s, time.monotonic())
        self.evicted: dict[int, str] = {}  # by process: why it was killed

    @property
    def due(self) -> float:
        """Return when to check next."""
        return self._watch.next_due

    def check(self, now: float) -> None:
        """Report or kill the ranks for which others wait. This takes some milliseconds every few seconds."""
        attempt, watch = self._attempt, self._watch
        known = attempt.ranks.processes.pids
        pids = {rank: known[rank] for rank in sorted(known) if attempt.state.is_running(rank)}
        groups, steps_ns = attempt.flights.logs(), {pid: at for pid in pids.values() if (at := self._last_step_ns(pid))}
        if watch.is_due(now):
            for suspect in watch.check(pids, groups, steps_ns, attempt.ranks.processes.stacks, now):
                attempt.send_signal(STACKS_SIGNAL, (suspect.rank,), group=False)
            slow = watch.find_slow(now)
            rank = next((rank for rank, pid in pids.items() if slow is not None and pid == slow.pid), None)
            if slow is not None and rank is not None:
                attempt.host.display.print(describe_slow(slow, rank))
        for suspect in watch.confirm(pids, groups, steps_ns, now):
            if known.get(suspect.rank) == suspect.pid:
                self._report_or_kill(suspect, groups)

    def _last_step_ns(self, pid: int) -> int:
        """Return when the process last completed a step; 0 if it reports no steps."""
        progress = self._attempt.pages.read(pid)
        tracks = (progress.loop, progress.state) if progress is not None else ()
        return max((track.recent[-1][0] for track in tracks if track is not None), default=0)

    def _report_or_kill(self, suspect: SuspectedRank, groups: Sequence[GroupLog]) -> None:
        """Report a rank that makes the others wait, and kill it if requested."""
        attempt, evict_after_s = self._attempt, self._attempt.plan.settings.evict_after_s
        rank_of = {pid: rank for rank, pid in attempt.ranks.processes.pids.items()}
        text = describe_wait(suspect, rank_of, groups)
        stack = read_stack(attempt.ranks.processes.stacks[suspect.rank], suspect.offset)
        report = f"phalanx run: {text}" + (f"\n{textwrap.indent(stack.rstrip(), '  ')}" if stack else "")
        if not suspect.evict:
            attempt.host.display.print(f"{report}\n--evict-after SECONDS kills such a rank.")
            return
        why = f"the others waited for it for {suspect.silent.silent_s:.1f} s"
        if not suspect.silent.waiting:
            why = f"it was inactive for {suspect.silent.silent_s:.1f} s"
        why += f" (--evict-after {evict_after_s:g})"
        if attempt.elastic.survives_loss_of(suspect.rank, suspect.pid):
            if not attempt.elastic.is_evicted(suspect.pid):  # it was not reported before
                attempt.host.display.print(report)
            attempt.do_elastic(attempt.elastic.evict(suspect.rank, why, time.monotonic()))
        else:
            self.evicted[suspect.pid] = f"It was killed: {text} (--evict-after).\n\n{stack}".rstrip()
            attempt.send_signal(signal.SIGKILL, (suspect.rank,), group=True)


def read_stack(fd: int, offset: int) -> str:
    """Return the stacks that a rank wrote since `offset`; empty if it did not answer."""
    data = os.pread(fd, _MAX_STACK_BYTES, offset if os.fstat(fd).st_size >= offset else 0)
    return without_launcher(data.decode(errors="replace"))


def describe_wait(suspect: SuspectedRank, rank_of: Mapping[int, int], groups: Sequence[GroupLog]) -> str:
    """Describe which ranks wait for the suspect, for how long, and its last operation."""
    silent = suspect.silent
    waiting = sorted(rank_of[pid] for pid in silent.waiting if pid in rank_of)
    who = f"rank {suspect.rank} (pid {suspect.pid})"
    where = "; ".join(filter(None, describe_process(suspect.pid, groups)))
    if waiting:
        return (
            f"{name_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for {who} in {silent.operation}, "
            f"for {silent.silent_s:.1f} s: it is {where}"
        )
    return f"{who} has been inactive for {silent.silent_s:.1f} s: it is {where}"


def describe_slow(slow: SlowProcess, rank: int) -> str:
    """Describe a rank that is slower than the others, and how long they wait for it."""
    return (
        f"phalanx run: rank {rank} (pid {slow.pid}) is slower than the others: in {slow.span_s:.0f} s it entered "
        f"{slow.times} of {slow.num_operations} operations last, and for {slow.share * 100:.0f} % of the time the "
        "others waited only for this rank. See `phalanx top` and `phalanx stacks`"
    )


# Find the rank for which the others wait: it does not enter an operation, or always enters last.
#
# The functions are pure.
#
#     rank 0   ─────┤ in all_reduce #7 ………………………… now
#     rank 1   ─────┤ in all_reduce #7 ………………………… now
#     rank 2   ──────── (not in any operation) ……… now        silent since ranks 0 and 1 entered, or its last activity
#
# A rank in an operation is not silent, unless its process is stopped, or in a system call that cannot be interrupted:
# such a rank may itself block the operation.

STUCK_STATES = "TtD"  # letters of /proc/PID/stat: stopped, in a debugger, in a system call that cannot be interrupted
_MIN_LAST_SHARE = 0.8  # a slow rank enters last in at least this share of the operations
_MIN_WAIT_SHARE = 0.1  # the others wait for a slow rank for at least this share of the time
_MIN_OPERATIONS = 50  # with fewer operations no rank is called slow


@dataclass(frozen=True)
class SilentProcess:
    """A `SilentProcess` makes the processes `waiting` wait in `operation`, for `silent_s` seconds so far."""

    pid: int
    silent_s: float
    waiting: tuple[int, ...]  # processes
    operation: str  # empty if only the process's state shows that it is stuck


def find_silent(
    groups: Sequence[GroupLog],
    pids: Collection[int],
    stuck_since_ns: Mapping[int, int],
    last_step_ns: Mapping[int, int],
    now_ns: int,
    resumed_ns: int = 0,
) -> list[SilentProcess]:
    """Return the processes among `pids` that make others wait, or that are stuck, the longest silence first.

    Arguments:
        groups: the logs of the ranks.
        stuck_since_ns: by process: when it was first seen in one of the states `STUCK_STATES`.
        last_step_ns: by process: when it last completed a step, if known.
        resumed_ns: when all processes last continued after being suspended; no silence counts from before.
    """
    # ignore groups that have lost a member: no rank waits in them any longer
    groups = [group for group in groups if all(rank.pid in pids for rank in group.ranks)]
    active_ns = _find_last_activity(groups, last_step_ns)
    running = _find_active(groups)
    found: dict[int, SilentProcess] = {}
    for group in groups:
        for (counted, seq), inside in _find_waiting(group, pids).items():
            began_ns = min(record.enter_ns for record in inside.values())
            for member in group.ranks:
                if member.pid not in pids or member.left or not member.came:
                    continue
                waiters = [record for pid, record in inside.items() if pid not in stuck_since_ns]
                has_entered = _has_entered(member.records, counted, seq, waiters)
                if member.pid in stuck_since_ns:
                    others = [r.enter_ns for pid, r in inside.items() if pid != member.pid]
                    if not others or (has_entered and member.pid not in inside):
                        continue
                    since_ns = max(stuck_since_ns[member.pid], min(others))
                elif has_entered or member.pid in running:
                    continue
                else:
                    since_ns = max(began_ns, active_ns.get(member.pid, 0))
                waiting = tuple(pid for pid in inside if pid != member.pid)
                operation = next(record.place for pid, record in inside.items() if pid in waiting)
                silent = SilentProcess(member.pid, max(0, now_ns - max(since_ns, resumed_ns)) / 1e9, waiting, operation)
                if member.pid not in found or found[member.pid].silent_s < silent.silent_s:
                    found[member.pid] = silent
    newest_ns = max(active_ns.values(), default=0)
    for pid, since_ns in stuck_since_ns.items():
        if pid in pids and pid not in found and not running:  # no process is in an operation
            since_ns = max(since_ns, newest_ns, resumed_ns)
            found[pid] = SilentProcess(pid, max(0, now_ns - since_ns) / 1e9, (), "")
    return sorted(found.values(), key=lambda silent: -silent.silent_s)


def _counter(record: Record) -> str:
    """Return the name of the counter that numbers an operation: gradient rounds are counted separately."""
    return "gradients" if record.kind == GRADIENTS else "calls"


def _has_entered(records: Sequence[Record], counted: str, seq: int, waiters: Sequence[Record]) -> bool:
    """Return whether the process with these records has entered operation `seq`, in which `waiters` are.

    Each reducer counts its own gradient rounds. A record with this number may belong to another reducer (DDP rebuilds
    its reducer after the first step) if the process left its last round before the others entered.
    """
    came = (record for record in records if _counter(record) == counted and record.seq >= seq)
    if counted == "calls" or not waiters:
        return any(came)
    latest_ns = max(record.enter_ns for record in waiters)
    return any(record.leave_ns == 0 or record.leave_ns >= latest_ns for record in came)


def _find_active(groups: Sequence[GroupLog]) -> set[int]:
    return {rank.pid for group in groups for rank in group.ranks if any(r.leave_ns == 0 for r in rank.records)}


def _find_last_activity(groups: Sequence[GroupLog], last_step_ns: Mapping[int, int]) -> dict[int, int]:
    active_ns = dict(last_step_ns)
    for group in groups:
        for rank in group.ranks:
            for record in rank.records[-1:]:
                active_ns[rank.pid] = max(active_ns.get(rank.pid, 0), record.enter_ns, record.leave_ns)
    return active_ns


def _find_waiting(group: GroupLog, pids: Collection[int]) -> dict[tuple[str, int], dict[int, Record]]:
    """Return the unfinished collectives of the group, by counter and number, with the record of each process inside."""
    waiting: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for rank in group.ranks:
        for record in rank.records:
            if record.leave_ns == 0 and record.is_collective and rank.pid in pids:
                waiting[_counter(record), record.seq][rank.pid] = record
    return waiting


@dataclass(frozen=True)
class SlowProcess:
    """A `SlowProcess` entered `times` operations last; the others waited for it for a fraction `share` of `span_s`."""

    pid: int
    times: int
    num_operations: int
    share: float
    span_s: float


class LatenessCounter:
    """`LatenessCounter` counts how often each process entered an operation last.

    Successive logs must overlap, so that no operation is missed.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[str, tuple[int, ...], str], int] = {}  # by group: the last operation that was counted
        self._times: dict[int, int] = defaultdict(int)
        self._lead_ns: dict[int, int] = defaultdict(int)
        self._num_operations = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    def add(self, groups: Sequence[GroupLog]) -> None:
        """Count the new operations that all ranks of a group have entered."""
        seen_ns: list[int] = []
        for group in groups:
            pids = tuple(rank.pid for rank in group.ranks)
            if len(pids) < group.world_size or len(pids) < 2:
                continue  # some ranks are on other hosts, or there are no others
            entered: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
            for rank in group.ranks:
                for record in rank.records:
                    if record.is_collective:
                        # reducers count separately: use the first reducer's, since some ranks may not have a second yet
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
            self._first_ns = min(seen_ns) if self._first_ns is None else self._first_ns
            self._last_ns = max(seen_ns)

    def find_slow(self) -> SlowProcess | None:
        """Return the process that is consistently slower than the others; None if there is none."""
        if self._num_operations < _MIN_OPERATIONS or self._first_ns is None:
            return None
        pid = max(self._times, key=self._times.__getitem__)
        span_ns = max(1, self._last_ns - self._first_ns)
        share = self._lead_ns[pid] / span_ns
        if self._times[pid] < _MIN_LAST_SHARE * self._num_operations or share < _MIN_WAIT_SHARE:
            return None
        return SlowProcess(pid, self._times[pid], self._num_operations, share, span_ns / 1e9)


# Describe the ranks that remain after others have exited: their state, and their last operation.

_MAX_LINES = 12

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted (a disk or a network file system?)",
    "T": "stopped (SIGSTOP or Ctrl-Z); `kill -CONT {pid}` continues it",
    "t": "stopped by a debugger",
    "Z": "exited, about to be reaped",
}


def describe_stragglers(
    pids: Mapping[int, int],
    ranks: Sequence[int],
    world_size: int,
    waited_s: float,
    groups: Sequence[GroupLog],
    local_ranks: range,
) -> str:
    """Return a heading, and a line for each of the first `_MAX_LINES` of `ranks`.

    `pids` are the processes by rank, and `groups` their logs. The line for a rank outside `local_ranks` reports only
    that the rank is on another host.
    """
    gone = world_size - len(ranks)
    lines = [f"phalanx run: {gone} of {world_size} ranks have exited; still running {waited_s:.1f} s later:"]
    for rank in ranks[:_MAX_LINES]:
        pid = pids.get(rank)
        absent = "not started yet" if rank in local_ranks else "on another host"
        said = describe_process(pid, groups) if pid is not None else (absent,)
        lines.append(f"  rank {rank}" + (f" (pid {pid})" if pid else "") + ": " + "; ".join(filter(None, said)))
    if len(ranks) > _MAX_LINES:
        lines.append(f"  … and {len(ranks) - _MAX_LINES} more")
    return "\n".join(lines)


def describe_process(pid: int, groups: Sequence[GroupLog]) -> tuple[str, str]:
    """Return a process's state and its last operation; empty where unknown."""
    return _STATES.get(read_state(pid), "").format(pid=pid), _describe_last(pid, groups)


def _describe_last(pid: int | None, groups: Sequence[GroupLog]) -> str:
    """Return the last operation of the process in any group; empty if there is none."""
    logs = [log.records for group in groups for log in group.ranks if log.pid == pid and log.records]
    if not logs:
        return ""
    return str(position_of(max(logs, key=lambda records: records[-1].enter_ns), time.monotonic_ns()))
