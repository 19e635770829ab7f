"""Divide each rank's time into computing, waiting and moving data, by comparing the ranks' flight recorders.

    rank 0   ──compute──┤ enter            │  leave ├──
    rank 1   ──compute─────────────────────┤ leave  ├──
                        │     waiting      │ moving │
                                        the last one has entered

An asynchronous operation counts as waiting and moving while it runs, even if the program computes meanwhile.
Point-to-point messages are left out: a receive may be posted long before a rank waits for it.

Outside operations, a rank computes or is idle. An idle rank uses no CPU, because it waits for its DataLoader, a disk or
a device. CPU time is known only for the whole time between two snapshots, and some of it may have been used inside
operations. So idle time may be underestimated, but never overestimated.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from phalanx._base.core_numbers import BROADCAST, BROADCAST_BUFFERS, GATHER, GRADIENTS, RECV, REDUCE, SCATTER, SEND
from phalanx._job.inspect.top.look import MAX_OPERATIONS, HostSnapshot, MemberSnapshot, RankOperation

LONGEST_NS = 10_000_000_000
_FROM_ROOT = (BROADCAST, SCATTER, BROADCAST_BUFFERS)
_ONE_WAY = (*_FROM_ROOT, REDUCE, GATHER)

HostPid = tuple[int, int]  # host and process


@dataclass(frozen=True)
class Times:
    """`Times` is the time of one process: of the observed `span_ns`, how much went into waiting and into moving data.

    Of `outside_ns`, the time outside operations, the process was idle for `idle_ns`; both are 0 if unknown.
    """

    span_ns: int
    waiting_ns: int
    moving_ns: int
    idle_ns: int = 0
    outside_ns: int = 0


@dataclass(frozen=True)
class LatenessOfRank:
    """`LatenessOfRank` is how often a process entered an operation last, and how long after all others in total."""

    times: int
    lead_ns: int


@dataclass(frozen=True)
class StuckOperation:
    """`StuckOperation` is an operation in which processes wait for others to enter, the longest for `waited_ns`."""

    group: str
    label: str
    inside: tuple[HostPid, ...]
    missing: tuple[HostPid, ...]
    num_unknown: int  # missing processes on hosts without a snapshot
    waited_ns: int


@dataclass(frozen=True)
class OperationTimes:
    """`OperationTimes` covers the time between two snapshots; `num_operations` counts what all members entered."""

    span_ns: int
    times: dict[HostPid, Times]
    lateness: dict[HostPid, LatenessOfRank]
    num_operations: int
    stuck: StuckOperation | None


@dataclass
class _Call:
    """A `_Call` is one collective, with the operation that each member recorded."""

    group: str
    world_size: int
    kind: int
    seq: int
    operations: dict[HostPid, RankOperation]
    ranks: dict[HostPid, int]


def measure(
    hosts: Sequence[HostSnapshot],
    since_ns: int,
    before: Mapping[HostPid, int] = types.MappingProxyType({}),
    longest_ns: int = LONGEST_NS,
) -> OperationTimes:
    """Divide the time of each process from `since_ns` to the snapshots.

    Begin later if that time is longer than `longest_ns`, or if the recorders do not reach that far back. `before` maps
    each process to its CPU time at `since_ns`.
    """
    now_ns = min((host.at_ns for host in hosts), default=0)
    members = [
        (group.name, group.world_size, (host.node, member.pid), member)
        for host in hosts
        for group in host.groups
        for member in group.members
    ]
    living = {(host.node, rank.pid) for host in hosts for rank in host.ranks}
    begin_ns = max(
        [since_ns, now_ns - longest_ns, *(_reaches_back(member) for _, _, who, member in members if who in living)]
    )
    calls = _match(hosts)
    spans: dict[HostPid, list[tuple[int, int, int]]] = defaultdict(list)  # enter, all others have arrived, leave
    lateness: dict[HostPid, LatenessOfRank] = {}
    num_operations = 0
    for call in calls:
        come_ns = _last_entry_ns(call)
        for who, operation in call.operations.items():
            leave_ns = operation.leave_ns or now_ns
            # A process that is still inside waits for others; for a finished operation their arrival is unknown.
            alone_ns = operation.enter_ns if operation.leave_ns else now_ns
            spans[who].append((operation.enter_ns, min(alone_ns if come_ns is None else come_ns, leave_ns), leave_ns))
        if come_ns is None or call.kind in _ONE_WAY or call.world_size < 2 or come_ns < begin_ns:
            continue
        num_operations += 1
        *_, (before_ns, _), (last_ns, who) = sorted((o.enter_ns, who) for who, o in call.operations.items())
        known = lateness.get(who, LatenessOfRank(0, 0))
        lateness[who] = LatenessOfRank(known.times + 1, known.lead_ns + last_ns - max(before_ns, begin_ns))
    times = {who: _divide(spans[who], begin_ns, now_ns) for who in living if who in spans}
    if begin_ns == since_ns:  # otherwise the CPU time covers a longer span
        for who, now in processor_times(hosts).items():
            if who in times and who in before:
                times[who] = _with_idle(times[who], now - before[who])
    return OperationTimes(max(0, now_ns - begin_ns), times, lateness, num_operations, _find_stuck(hosts, calls, now_ns))


def add(several: Iterable[OperationTimes]) -> OperationTimes | None:
    """Return the sum of `several`, for the last one's processes and with its `stuck`; None if `several` is empty."""
    list_ = list(several)
    if not list_:
        return None
    times: dict[HostPid, Times] = {}
    lateness: dict[HostPid, LatenessOfRank] = {}
    for measured in list_:
        for who, t in measured.times.items():
            o = times.get(who, Times(0, 0, 0))
            pairs = zip(astuple(o), astuple(t), strict=True)
            times[who] = Times(*(so_far + more for so_far, more in pairs))
        for who, late in measured.lateness.items():
            known = lateness.get(who, LatenessOfRank(0, 0))
            lateness[who] = LatenessOfRank(known.times + late.times, known.lead_ns + late.lead_ns)
    last = list_[-1]
    times = {who: t for who, t in times.items() if who in last.times}
    span_ns = sum(measured.span_ns for measured in list_)
    return OperationTimes(span_ns, times, lateness, sum(measured.num_operations for measured in list_), last.stuck)


def processor_times(hosts: Sequence[HostSnapshot]) -> dict[HostPid, int]:
    """Return the CPU time of each process for which it is known, in nanoseconds."""
    return {
        (host.node, rank.pid): rank.processor_ns
        for host in hosts
        for rank in host.ranks
        if rank.processor_ns is not None
    }


def _with_idle(times: Times, processor_ns: int) -> Times:
    outside_ns = max(0, times.span_ns - times.waiting_ns - times.moving_ns)
    idle_ns = min(outside_ns, max(0, outside_ns - processor_ns))
    return replace(times, idle_ns=idle_ns, outside_ns=outside_ns)


def _reaches_back(member: MemberSnapshot) -> int:
    """Return the time from which on all of the process's operations in the group are known."""
    return member.operations[0].enter_ns if len(member.operations) >= MAX_OPERATIONS else 0


def _match(hosts: Sequence[HostSnapshot]) -> list[_Call]:
    """Return the collectives, each with the processes known to have called it."""
    calls: dict[tuple[str, int, int, int, int], list[_Call]] = defaultdict(list)
    for host in hosts:
        # A new group of the ranks has the old group's name. Hosts agree on its number, counted from the newest group.
        later: dict[tuple[str, int], int] = defaultdict(int)
        for group in reversed(host.groups):
            number = later[group.name, group.world_size]
            later[group.name, group.world_size] += 1
            for member in group.members:
                for operation in member.operations:
                    if operation.kind in (SEND, RECV):
                        continue
                    key = (group.name, group.world_size, number, operation.seq, operation.kind)
                    who = (host.node, member.pid)
                    call = next((call for call in calls[key] if _is_of(operation, who, call)), None)
                    if call is None:
                        call = _Call(group.name, group.world_size, operation.kind, operation.seq, {}, {})
                        calls[key].append(call)
                    call.operations[who] = operation
                    call.ranks[who] = member.rank
    return [call for alike in calls.values() for call in alike]


def _is_of(operation: RankOperation, who: HostPid, call: _Call) -> bool:
    """Return whether a process's operation, which has the number of `call`, belongs to `call`.

    DDP rebuilds its reducer after the first step, and each reducer counts its rounds of gradients from 1. Rounds with
    the same number are the same round if no rank had left before another entered.
    """
    if operation.kind != GRADIENTS:
        return True
    return who not in call.operations and all(
        (not other.leave_ns or operation.enter_ns <= other.leave_ns)
        and (not operation.leave_ns or other.enter_ns <= operation.leave_ns)
        for other in call.operations.values()
    )


def _last_entry_ns(call: _Call) -> int | None:
    """Return when the last required process entered; None if a required process has not entered, or is unknown."""
    if call.kind in _FROM_ROOT:
        for who, operation in call.operations.items():
            if operation.root == call.ranks[who]:
                return operation.enter_ns
    if len(call.operations) < call.world_size:
        return None
    return max(operation.enter_ns for operation in call.operations.values())


def _divide(spans: Sequence[tuple[int, int, int]], begin_ns: int, now_ns: int) -> Times:
    """Return the time of operations that may overlap: their union, and how much of it was waiting."""
    busy = _length([(enter, leave) for enter, _, leave in spans], begin_ns, now_ns)
    waiting = _length([(enter, come) for enter, come, _ in spans], begin_ns, now_ns)
    return Times(max(0, now_ns - begin_ns), waiting, busy - waiting)


def _length(intervals: Iterable[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """Return the length of the union of `intervals` within `begin_ns` and `end_ns`."""
    total, reached = 0, begin_ns
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end_ns)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def _find_stuck(hosts: Sequence[HostSnapshot], calls: Sequence[_Call], now_ns: int) -> StuckOperation | None:
    """Return the operation in which a process waits longest for others."""
    living = {(host.node, rank.pid) for host in hosts for rank in host.ranks}
    longest: StuckOperation | None = None
    for call in calls:
        inside = {who: o for who, o in call.operations.items() if o.leave_ns == 0 and who in living}
        if not inside or len(call.operations) >= call.world_size:
            continue
        waited_ns = now_ns - min(operation.enter_ns for operation in inside.values())
        if longest is not None and longest.waited_ns >= waited_ns:
            continue
        missing = {
            (host.node, member.pid)
            for host in hosts
            for group in host.groups
            if (group.name, group.world_size) == (call.group, call.world_size)
            for member in group.members
        } - set(call.operations)
        label = next((o.label for o in inside.values() if o.label), "")
        num_unknown = call.world_size - len(call.operations) - len(missing)
        longest = StuckOperation(
            call.group, label, tuple(sorted(inside)), tuple(sorted(missing)), num_unknown, waited_ns
        )
    return longest
