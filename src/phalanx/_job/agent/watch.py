"""Look at the ranks from time to time, while they run: a rank that keeps the others waiting is reported, or killed.

every few seconds    states of processes, pages of progress, flight recorders     nothing is asked of a rank
somebody is silent   ask it for its Python stack, wait half a second
then                 say who waits for whom, where it is; with --evict-after: kill it
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx._base.processes import read_state
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.agent.stragglers import describe_process
from phalanx._job.agent.waited_for import STANDING, LatenessCounter, Silent, Slow, find_silent
from phalanx._job.inspect.stacks.dump import without_launcher

_LOOK_S = 15.0
_QUICKEST_LOOK_S = 0.1
_LOOKS_IN_TIME = 5  # a silent rank is killed only after so many looks at it
_ANSWER_S = 0.5  # a rank writes its stack within a millisecond, unless it cannot
_TELL_AFTER_S = (60.0, 600.0, 3600.0)
_SLOW_AFTER_S = 60.0
_MAX_STACK_BYTES = 1 << 16


@dataclass(frozen=True)
class Accused:
    """An `Accused` is a rank that keeps the others waiting; asked for its stack, it writes it behind `offset`."""

    rank: int
    pid: int
    silent: Silent
    offset: int
    due: float
    evict: bool


class Watch:
    """A `Watch` looks at the ranks of one attempt. `evict_after_s` is None if nobody is killed for being silent."""

    def __init__(self, evict_after_s: float | None, now: float) -> None:
        self._evict_after_s = evict_after_s
        self._period_s = _LOOK_S
        if evict_after_s is not None:
            self._period_s = min(_LOOK_S, max(_QUICKEST_LOOK_S, evict_after_s / _LOOKS_IN_TIME))
        self._next_look = now + self._period_s
        self._standing: dict[int, int] = {}  # by process: since when it is in such a state (ns)
        self._told: dict[int, int] = {}  # by process: how often it was reported in this silence
        self._accused: dict[int, Accused] = {}  # by rank: what it is accused of
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
    ) -> list[Accused]:
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
                and states[silent.pid] != "t"  # somebody is debugging
            )
            tell = times < len(_TELL_AFTER_S) and silent.silent_s >= _TELL_AFTER_S[times]
            if rank in self._accused or not (evict or tell) or (not evict and not silent.waiting):
                continue
            self._told[silent.pid] = times + 1
            offset = os.fstat(stacks[rank]).st_size if rank in stacks else 0
            self._accused[rank] = Accused(rank, silent.pid, silent, offset, now + _ANSWER_S, evict)
            new.append(self._accused[rank])
        return new

    def judge(
        self, pids: Mapping[int, int], groups: Sequence[GroupLog], steps_ns: Mapping[int, int], now: float
    ) -> list[Accused]:
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


def read_stack(fd: int, offset: int) -> str:
    """Return what a rank wrote of its stacks since `offset`; empty if it did not answer."""
    data = os.pread(fd, _MAX_STACK_BYTES, offset if os.fstat(fd).st_size >= offset else 0)
    return without_launcher(data.decode(errors="replace"))


def describe_wait(accused: Accused, rank_of: Mapping[int, int], groups: Sequence[GroupLog]) -> str:
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
    """Return in words what a rank that is slower than the others costs."""
    return (
        f"phalanx run: rank {rank} (pid {slow.pid}) is slower than the others: in {slow.span_s:.0f} s it came last "
        f"to {slow.times} of {slow.num_operations} operations, and for {slow.share * 100:.0f} % of the time they "
        "waited for it alone. `phalanx top` shows it, `phalanx stacks` where it is"
    )
