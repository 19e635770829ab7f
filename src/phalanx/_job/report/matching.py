"""Match the ranks' records of the same collectives, to find which ranks waited and how fast data moved.

rank 0   ──────┤ enter        │  leave ├──        waiting: until the last rank has entered
rank 1   ────────────────┤ enter│ leave ├──       moving: from then on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx._base.core_numbers import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    GATHER,
    GRADIENTS,
    KIND_NAMES,
    REDUCE_SCATTER,
    SCATTER,
)
from phalanx._comm.diagnostics.step_machine import PHASES
from phalanx._comm.diagnostics.step_records import OperationRecord
from phalanx._job.report.measurements import CollectiveTimes, Lateness


@dataclass(frozen=True)
class ProcessSample:
    """A `ProcessSample` has the operations, groups, clock offset and end of warm-up of one process."""

    rank: int
    groups: Sequence[tuple[str, int, int]]  # name, generation, number of earlier groups with this name
    operations: Sequence[OperationRecord]
    warm_ns: float
    end_ns: float  # the end of the last step
    num_steps: int
    offset_ns: float = 0.0
    recoveries: Sequence[tuple[float, float]] = ()  # spans of recoveries from a loss; operations in them are ignored


@dataclass
class Split:
    """A `Split` has the seconds per step that one process waited, and moved data, by phase."""

    waiting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moving: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class MatchedRecords:
    """`MatchedRecords` is the result of `match`; `splits` are in the order of the processes."""

    splits: tuple[Split, ...]
    collectives: tuple[CollectiveTimes, ...]
    lateness: tuple[Lateness, ...]
    num_matched: int


@dataclass(frozen=True)
class _Entry:
    process: int
    enter: float
    leave: float
    phase: str
    num_bytes: float


def match(processes: Sequence[ProcessSample]) -> MatchedRecords:
    """Match the collectives of processes that were in the same groups."""
    calls: dict[_Key, list[_Entry]] = defaultdict(list)
    seen: dict[tuple[int, tuple[str, int, int], int, int], int] = defaultdict(int)
    members: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for number, process in enumerate(processes):
        for op in process.operations:
            index = int(op.group)
            if not 0 <= index < len(process.groups) or not process.warm_ns <= op.enter_ns <= process.end_ns:
                continue
            if any(begin <= op.enter_ns <= end for begin, end in process.recoveries):
                continue
            group = process.groups[index]
            members[group].add(number)
            phase = int(op.phase)
            entry = _Entry(
                number,
                (op.enter_ns + process.offset_ns) / 1e9,
                (op.leave_ns + process.offset_ns) / 1e9,
                PHASES[phase] if 0 <= phase < len(PHASES) else "other",
                op.num_bytes,
            )
            kind, seq = int(op.kind), int(op.seq)
            calls[group, kind, seq, seen[number, group, kind, seq]].append(entry)
            seen[number, group, kind, seq] += 1  # numbers repeat: each reducer counts its rounds of gradients from 1
    whole = {
        key: entries for key, entries in calls.items() if len({e.process for e in entries}) == len(members[key[0]]) > 1
    }
    splits = tuple(Split() for _ in processes)
    late: dict[int, list[float]] = defaultdict(list)
    scales = _scales(calls, whole, [not process.num_steps for process in processes])
    steps = [max(1, process.num_steps) for process in processes]
    for (group, kind, *_), entries in whole.items():
        come = max(entry.enter for entry in entries)
        *_, before, last = sorted(entries, key=lambda entry: entry.enter)
        late[last.process].append((last.enter - before.enter) * scales[group, kind == GRADIENTS, last.process])
        for entry in entries:
            scale = scales[group, kind == GRADIENTS, entry.process]
            reached = min(max(come, entry.enter), entry.leave)
            splits[entry.process].waiting[entry.phase] += (reached - entry.enter) * scale / steps[entry.process]
            splits[entry.process].moving[entry.phase] += (entry.leave - reached) * scale / steps[entry.process]
    lateness = tuple(
        Lateness(processes[number].rank, len(leads), sum(leads) / steps[number])
        for number, leads in sorted(late.items())
    )
    return MatchedRecords(splits, _summarise(whole, scales), lateness, len(whole))


_Key = tuple[tuple[str, int, int], int, int, int]  # group, kind, number, count of earlier calls with this number
_Calls = Mapping[_Key, Sequence[_Entry]]
_Scales = Mapping[tuple[tuple[str, int, int], bool, int], float]


def _scales(calls: _Calls, whole: _Calls, is_from_start: Sequence[bool]) -> _Scales:
    """Return how many calls each record of a process represents: all calls are numbered, but only some are recorded.

    `is_from_start` has, for each process, whether calls count from number 1 on. They do for processes without steps,
    which have no warm-up, and record only the latest calls.

    The result is per process, because a replacement has fewer calls and steps than other processes.
    """
    seqs: dict[tuple[tuple[str, int, int], bool, int], list[int]] = defaultdict(list)
    known: dict[tuple[tuple[str, int, int], bool], int] = defaultdict(int)
    for (group, kind, seq, _), entries in calls.items():
        for entry in entries:
            seqs[group, kind == GRADIENTS, entry.process].append(seq)
    for group, kind, *_ in whole:
        known[group, kind == GRADIENTS] += 1
    return {
        key: max(1.0, (max(of) - (1 if is_from_start[key[2]] else min(of)) + 1) / known[key[:2]])
        for key, of in seqs.items()
        if key[:2] in known
    }


def _summarise(whole: _Calls, scales: _Scales) -> tuple[CollectiveTimes, ...]:
    rows: dict[tuple[int, float, int], list[tuple[float, float, float]]] = defaultdict(list)
    for (group, kind, *_), entries in whole.items():
        come, gone = max(e.enter for e in entries), max(e.leave for e in entries)
        waited = sum(min(come, e.leave) - e.enter for e in entries if e.leave > e.enter) / len(entries)
        num_bytes = max(e.num_bytes for e in entries)
        scale = max(scales[group, kind == GRADIENTS, entry.process] for entry in entries)
        rows[kind, num_bytes, len(entries)].append((gone - come, waited, scale))
    found = []
    for (kind, num_bytes, num_ranks), calls in rows.items():
        duration = max(median(took for took, _, _ in calls), 1e-7)
        moved = num_bytes * _bus_factor(kind, num_ranks)
        found.append(
            CollectiveTimes(
                name=KIND_NAMES.get(kind, f"operation {kind}"),
                num_bytes=num_bytes,
                num_ranks=num_ranks,
                count=sum(scale for _, _, scale in calls),
                duration_s=duration,
                waiting_s=sum(waited for _, waited, _ in calls) / len(calls),
                bandwidth=moved / duration if moved and kind not in (BARRIER, GRADIENTS) else None,
                overlapped=kind == GRADIENTS,
            )
        )
    return tuple(sorted(found, key=lambda row: -row.count * (row.duration_s + row.waiting_s)))


def _bus_factor(kind: int, num_ranks: int) -> float:
    """Return the bytes on the bus per byte of a rank's input (scatter, reduce_scatter: output), as in nccl-tests."""
    if kind in (ALL_REDUCE, GRADIENTS):
        return 2 * (num_ranks - 1) / num_ranks
    if kind in (ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER):
        return num_ranks - 1.0
    return (num_ranks - 1) / num_ranks if kind == ALL_TO_ALL else 1.0
