"""Combine several snapshots of a job into the rows and sentences that `phalanx top` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._base.core_numbers import GRADIENTS
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.diagnostics.progress_page import Track
from phalanx._job.inspect.top.look import HostSnapshot, RankOperation, RankSnapshot
from phalanx._job.inspect.top.times import HostPid, OperationTimes, Times

RECENT_NS = 10_000_000_000  # rates are measured over this time
_OFTEN = 0.5  # the slowest rank enters last in at least this share of the operations
_FEW = 5  # fewer operations do not show which rank is slow
_COSTLY = 0.01  # the minimum share of the time to report
_STUCK_NS = 1_000_000_000

COMMITTED, COUNTED, ROUNDS = "phalanx.elastic.State", "phalanx.progress", "rounds of gradients"


@dataclass(frozen=True)
class Pace:
    """`Pace` is a rank's progress. `steps_of` is its source: State, progress, or else DDP's rounds in the recorder."""

    steps_of: str
    step: int
    total_steps: int | None
    steps_per_s: float | None
    samples_per_s: float | None


# The parts of a rank's time. Outside of operations, it may be unknown whether the rank computes or is idle.
SHARES = ("computing", "idle", "computing_or_idle", "waiting", "communicating")


@dataclass(frozen=True)
class RankView:
    """A `RankView` shows a rank. Its shares of time (`SHARES`) are from 0 to 1, or None if unknown, and add up to 1."""

    rank: int
    host: str
    node: int
    pid: int
    state: str
    pace: Pace | None
    computing: float | None
    idle: float | None
    computing_or_idle: float | None
    waiting: float | None
    communicating: float | None
    memory_bytes: int | None
    memory_is_pss: bool
    operation: str
    inside_s: float | None


@dataclass(frozen=True)
class SlowestRank:
    """`SlowestRank` is the rank that enters most operations last; the others wait for it for `share` of the time."""

    rank: int
    host: str
    times_last: int
    num_operations: int
    share: float


@dataclass(frozen=True)
class StuckView:
    """A `StuckView` is a set of ranks that wait in an operation which others have not entered."""

    operation: str
    group: str
    inside: tuple[int, ...]
    missing: tuple[int, ...]
    num_unknown: int
    waited_s: float


@dataclass(frozen=True)
class LostView:
    """A `LostView` is a lost rank; the job has continued without it, or with a replacement."""

    rank: int
    pid: int
    ago_s: float
    why: str


@dataclass(frozen=True)
class JobView:
    """A `JobView` shows a job. `notes` are sentences on missing data; `report` is the report's folder, if any."""

    pid: int
    target: str
    world_size: int
    elapsed_s: float
    restart_count: int
    max_restarts: int
    generation: int
    num_hosts: int
    ended: tuple[tuple[int, int], ...]
    lost: tuple[LostView, ...]
    pace: Pace | None
    slowest: SlowestRank | None
    stuck: StuckView | None
    span_s: float
    ranks: tuple[RankView, ...]
    notes: tuple[str, ...]
    report: str = ""


def view(hosts: Sequence[HostSnapshot], measured: OperationTimes | None, notes: Sequence[str] = ()) -> JobView:
    """Return the job's state from its hosts' snapshots. The first of `hosts` has the data of the whole job."""
    first = hosts[0]
    ranks = sorted(
        (_view_rank(host, rank, measured) for host in hosts for rank in host.ranks),
        key=lambda rank: (rank.rank, rank.node),
    )
    who = {(host.node, rank.pid): rank.rank for host in hosts for rank in host.ranks}
    names = {host.node: host.name for host in hosts}
    ended = {rank: code for host in hosts for rank, code in host.ended}
    for rank in ranks:
        ended.pop(rank.rank, None)  # a new process has replaced the one that ended
    return JobView(
        pid=first.agent,
        target=first.target,
        world_size=first.world_size,
        elapsed_s=(first.at_ns - first.started_ns) / 1e9,
        restart_count=first.restart_count,
        max_restarts=first.max_restarts,
        generation=max([host.generation for host in hosts] + [_generation_of(r) for h in hosts for r in h.ranks]),
        num_hosts=first.num_nodes,
        ended=tuple(sorted(ended.items())),
        lost=tuple(LostView(rank, pid, (first.at_ns - at) / 1e9, why) for rank, pid, at, why in first.lost),
        pace=_pace_of_job([rank.pace for rank in ranks if rank.pace is not None]),
        slowest=_find_slowest(measured, who, names),
        stuck=_view_stuck(measured, who),
        span_s=measured.span_ns / 1e9 if measured is not None else 0.0,
        ranks=tuple(ranks),
        notes=tuple(notes),
        report=first.report,
    )


def _generation_of(rank: RankSnapshot) -> int:
    return rank.progress.generation if rank.progress is not None else 0


def _view_rank(host: HostSnapshot, rank: RankSnapshot, measured: OperationTimes | None) -> RankView:
    operations = [m.operations for group in host.groups for m in group.members if m.pid == rank.pid and m.operations]
    times = measured.times.get((host.node, rank.pid)) if measured is not None else None
    position = _position(operations, host.at_ns)
    return RankView(
        rank=rank.rank,
        host=host.name,
        node=host.node,
        pid=rank.pid,
        state=rank.state,
        pace=_pace(rank, operations, host.at_ns),
        **_shares(times),
        memory_bytes=rank.memory.num_bytes if rank.memory is not None else None,
        memory_is_pss=rank.memory is not None and rank.memory.is_pss,
        operation=position.operation,
        inside_s=position.seconds if position.inside else None,
    )


def _shares(times: Times | None) -> dict[str, float | None]:
    """Return the share of the time for each of `SHARES`."""
    shares: dict[str, float | None] = dict.fromkeys(SHARES)
    if times is None or times.span_ns <= 0:
        return shares
    waiting, moving = times.waiting_ns / times.span_ns, times.moving_ns / times.span_ns
    outside = max(0.0, 1.0 - waiting - moving)
    if times.outside_ns <= 0:
        return shares | {"computing_or_idle": outside, "waiting": waiting, "communicating": moving}
    idle = outside * times.idle_ns / times.outside_ns
    computing = max(0.0, outside - idle)  # rounding
    return shares | {"computing": computing, "idle": idle, "waiting": waiting, "communicating": moving}


def _position(operations: Sequence[Sequence[RankOperation]], now_ns: int) -> RankPosition:
    """Return the rank's current or latest operation."""
    last = [operations_[-1] for operations_ in operations]
    if not last:
        return RankPosition()
    inside = [operation for operation in last if operation.leave_ns == 0]
    operation = max(inside or last, key=lambda operation: operation.enter_ns)
    seconds = (now_ns - operation.enter_ns) / 1e9 if inside else 0.0
    return RankPosition(operation.seq, operation.label, bool(inside), seconds)


def _pace(rank: RankSnapshot, operations: Sequence[Sequence[RankOperation]], now_ns: int) -> Pace | None:
    progress = rank.progress
    loop = progress.loop if progress is not None else None
    state = progress.state if progress is not None else None
    track = state or loop
    if track is not None:
        samples = next((t for t in (state, loop) if t is not None and t.recent[-1][1] > 0), None)
        rate = _rate([at for at, _ in track.recent], now_ns)
        total = loop.total_steps if loop is not None and state is None else None
        return Pace(
            COMMITTED if state is not None else COUNTED,
            track.steps,
            total,
            rate,
            _samples_per_s(samples, now_ns) if samples is not None else None,
        )
    rounds = [operation for each in operations for operation in each if operation.kind == GRADIENTS]
    if not rounds:
        return None
    times = sorted(operation.leave_ns for operation in rounds if operation.leave_ns)
    done = max((operation.seq for operation in rounds if operation.leave_ns), default=0)
    return Pace(ROUNDS, done, None, _rate(times, now_ns), None)


def _recent(times: Sequence[int], now_ns: int) -> int:
    """Return the index of the first recent time in `times`, oldest first; the last two always count as recent."""
    begin = next((i for i, at in enumerate(times) if at >= now_ns - RECENT_NS), len(times))
    return max(0, min(begin, len(times) - 2))


def _span_ns(times: Sequence[int], now_ns: int) -> int:
    """Return the duration of the steps, including the time since the last step if it is longer than usual."""
    took_ns = times[-1] - times[0]
    since_ns = now_ns - times[-1]
    return took_ns + since_ns if since_ns * (len(times) - 1) > 3 * took_ns else took_ns


def _rate(times: Sequence[int], now_ns: int) -> float | None:
    """Return events per second; None if there were fewer than two events."""
    times = times[_recent(times, now_ns) :]
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (len(times) - 1) / (_span_ns(times, now_ns) / 1e9)


def _samples_per_s(track: Track, now_ns: int) -> float | None:
    recent = track.recent[_recent([at for at, _ in track.recent], now_ns) :]
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    return (recent[-1][1] - recent[0][1]) / (_span_ns([at for at, _ in recent], now_ns) / 1e9)


def _pace_of_job(paces: Sequence[Pace]) -> Pace | None:
    """Return the pace of the job: the steps that all ranks have completed, and the sum of the ranks' samples."""
    if not paces:
        return None
    behind = min(paces, key=lambda pace: pace.step)
    rates = [pace.steps_per_s for pace in paces if pace.steps_per_s is not None]
    samples = [pace.samples_per_s for pace in paces if pace.samples_per_s is not None]
    return Pace(
        behind.steps_of,
        behind.step,
        behind.total_steps,
        min(rates) if rates else None,
        sum(samples) if samples else None,
    )


def left_s(pace: Pace | None) -> float | None:
    """Return the seconds until the loop's end at this pace; None if unknown."""
    if pace is None or not pace.total_steps or not pace.steps_per_s:
        return None
    return max(0, pace.total_steps - pace.step) / pace.steps_per_s


def _find_slowest(
    measured: OperationTimes | None, who: dict[HostPid, int], names: dict[int, str]
) -> SlowestRank | None:
    if measured is None or measured.span_ns <= 0 or measured.num_operations < _FEW:
        return None
    known = [(late.lead_ns, member, late) for member, late in measured.lateness.items() if member in who]
    if not known:
        return None
    lead_ns, member, late = max(known)
    share = lead_ns / measured.span_ns
    if late.times < _OFTEN * measured.num_operations or share < _COSTLY:
        return None
    return SlowestRank(who[member], names[member[0]], late.times, measured.num_operations, share)


def _view_stuck(measured: OperationTimes | None, who: dict[HostPid, int]) -> StuckView | None:
    stuck = measured.stuck if measured is not None else None
    if stuck is None or stuck.waited_ns < _STUCK_NS:
        return None
    inside = tuple(sorted(who[member] for member in stuck.inside if member in who))
    missing = tuple(sorted(who[member] for member in stuck.missing if member in who))
    return StuckView(stuck.label, stuck.group, inside, missing, stuck.num_unknown, stuck.waited_ns / 1e9)
