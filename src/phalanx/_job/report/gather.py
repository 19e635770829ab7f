"""Combine the records of the ranks and the launcher into the `Measurements` of a run."""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from phalanx._comm.diagnostics.step_file import RankFile
from phalanx._comm.diagnostics.step_records import StepRecord, merge
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.matching import ProcessSample, Split, match
from phalanx._job.report.measurements import PARTS, Curve, Measurements, RankRun
from phalanx._job.report.records import is_running, run_of

MAX_POINTS = 240  # the maximum number of points of a curve: more than a screen can show
_CLOCKS_APART_S = 60.0  # the maximum difference between hosts' clocks; older files belong to an earlier run
_WARM_STEPS, _WARM_SHARE = 5, 0.1  # means leave out the first steps, which allocate memory and compile code


def find_job(folder: str, files: Sequence[RankFile]) -> JobRecord:
    """Return the launcher's record in `folder`; without one, a record derived from the ranks' files.

    A launcher that did not record the job's end, and is no longer running, was killed.
    """
    job = JobRecord.read(folder)
    if job is None:  # another launcher started the ranks, and rank 0 has left no record
        begun = min((file.begun for file in files), default=0.0)
        unix = min((file.begun + file.unix_offset for file in files), default=0.0)
        sizes = [int(file.facts.get("world_size", 1)) for file in files]
        return JobRecord("run", "", begun, unix, max(sizes, default=0))
    if job.end == "running" and job.host == socket.gethostname() and not is_running(job):
        return replace(job, end="killed", end_text="the launcher was killed, and its ranks with it")
    return job


def of_ranks(job: JobRecord, files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files of this run; if a process of a rank has trained, leave out the rank's untrained processes."""
    files = [file for file in files if is_of_run(job, file)]
    trains = {(_attempt(file), file.facts.get("rank")) for file in files if file.steps_done}
    return [file for file in files if file.steps_done or (_attempt(file), file.facts.get("rank")) not in trains]


def is_of_run(job: JobRecord, file: RankFile) -> bool:
    """Return whether a rank of this run wrote `file`, by the run's id and, unless the id is unique, by the clock."""
    if job.run and run_of(file) not in ("", job.run):
        return False
    if job.is_run_unique and run_of(file):  # a host's clock may be wrong
        return True
    return file.begun + file.unix_offset > job.begun_unix - _CLOCKS_APART_S


def combine(job: JobRecord, files: Sequence[RankFile]) -> Measurements:
    """Combine `job` and the ranks' `files` into measurements of the run."""
    offsets = [job.clock_offsets.get(str(file.facts.get("host", "")), 0.0) for file in files]
    newest = max((_attempt(file) for file in files), default=0)
    trains = any(file.steps for file in files)  # otherwise the ranks' messages still deserve a table
    latest = [i for i, file in enumerate(files) if _attempt(file) == newest and (file.steps or not trains)]
    matched = match([_sampled(files[i], offsets[i]) for i in latest])
    splits: dict[int, Split] = dict(zip(latest, matched.splits, strict=True))
    ranks = tuple(_measure(file, splits.get(i, Split()), offsets[i] - job.begun) for i, file in enumerate(files))
    ranks = _tell_hosts_apart(ranks)
    ended = job.ended if job.ended is not None else max((rank.end + job.begun for rank in ranks), default=job.begun)
    trained = [files[i] for i in latest if trains]
    broken, stays = _broken(trained)
    return Measurements(
        name=job.name,
        command=job.command,
        begun_unix=job.begun_unix,
        duration_s=ended - job.begun,
        end=job.end,
        end_text=job.end_text,
        exit_code=job.exit_code,
        world_size=job.world_size,
        max_restarts=job.max_restarts,
        ranks=ranks,
        loss=_loss_curve([file for file in files if file.steps]),
        broken_step=broken,
        stays_broken=stays,
        throughput=_throughput(trained, [offsets[i] - job.begun for i in latest if trains]),
        has_samples=any(step.samples for file in trained for step in file.steps),
        collectives=matched.collectives,
        lateness=matched.lateness,
        num_matched=matched.num_matched,
        copy_bytes_per_s=job.copy_bytes_per_s,
        events=tuple(sorted(job.events, key=lambda event: event.at)),
    )


def _tell_hosts_apart(ranks: tuple[RankRun, ...]) -> tuple[RankRun, ...]:
    """Append the node number to each host name that several hosts share, as the launcher does."""
    nodes: dict[str, set[int]] = defaultdict(set)
    for rank in ranks:
        nodes[rank.host].add(rank.node)
    return tuple(replace(r, host=f"{r.host}#{r.node}") if len(nodes[r.host]) > 1 else r for r in ranks)


def _attempt(file: RankFile) -> int:
    return int(file.facts.get("attempt", 0))


def _rank(file: RankFile) -> int:
    """Return the process's last rank, which may differ from its first in an elastic job."""
    return int(file.steps[-1].rank if file.steps else file.facts.get("rank", 0))


def _num_warm(records: Sequence[StepRecord]) -> int:
    """Return how many records at the beginning are left out of means."""
    total = sum(record.num_steps for record in records)
    most = min(_WARM_STEPS, total * _WARM_SHARE)
    done = accumulate(record.num_steps for record in records)
    warm = sum(1 for so_far in done if so_far <= most)
    return min(max(warm, 1 if len(records) > 2 else 0), max(0, len(records) - 1))


def _steady(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records for means: without the first steps, and without steps in which the ranks regrouped."""
    after = records[1:]
    left = [
        record
        for i, record in enumerate(records)
        if i >= len(after) or record.num_steps > 1 or record.generation == after[i].generation
    ]
    return left[_num_warm(left) :]


def _sampled(file: RankFile, offset: float) -> ProcessSample:
    steady = _steady(file.steps)
    groups = [(str(g["name"]), int(g["generation"]), int(g["again"])) for g in file.facts.get("groups", ())]
    num_steps = int(sum(record.num_steps for record in steady))
    return ProcessSample(
        rank=_rank(file),
        groups=groups,
        operations=file.operations,
        warm_ns=steady[0].begin * 1e9 if steady else 0.0,
        end_ns=steady[-1].end * 1e9 if steady else math.inf,
        num_steps=num_steps,
        offset_ns=offset * 1e9,
        recoveries=[(a.end * 1e9, b.begin * 1e9) for a, b in pairwise(steady) if b.begin > a.end],
    )


def _measure(file: RankFile, split: Split, shift: float) -> RankRun:
    facts = {name: value for name, value in file.facts.items() if name not in ("rank", "attempt", "pid", "groups")}
    records = file.steps
    steady = _steady(records)
    num = sum(record.num_steps for record in steady) or 1.0
    whole = sum(record.end - record.begin for record in steady)
    parts = _parts(steady, split, num)
    span = records[-1].end - records[0].end if len(records) > 1 else 0.0
    last = records[-1] if records else None
    return RankRun(
        rank=_rank(file),
        attempt=_attempt(file),
        pid=int(file.facts.get("pid", 0)),
        host=str(file.facts.get("host", "")),
        node=int(file.facts.get("node", 0)),
        facts=facts,
        begin=file.begun + shift,
        end=max(file.phase_since, last.end if last else file.begun) + shift,
        first_step=records[0].begin + shift if records else None,
        steps=file.steps_done,
        first_number=1 if file.reached is None else file.reached - file.steps_done + 1,
        step_s=whole / num if steady else 0.0,
        longest_s=max((record.longest for record in steady), default=0.0),
        parts=parts,
        samples_per_step=sum(record.samples for record in steady) / num,
        num_workers=file.num_workers,
        last_phase=file.phase,
        ended=file.ended,
        cpu_share=(records[-1].cpu_s - records[0].cpu_s) / span if span > 1.0 else None,
        preemptions_per_s=(records[-1].preemptions - records[0].preemptions) / span if span > 1.0 else None,
        resident_bytes=last.resident_bytes if last else 0.0,
        shared_bytes=last.shared_bytes if last else 0.0,
        peak_bytes=float(file.peak_bytes),
        device_bytes=max((record.device_bytes for record in records), default=0.0),
        step_curve=tuple((r.end + shift, (r.end - r.begin) / r.num_steps) for r in _thin(steady)),
        memory_curve=tuple((r.end + shift, r.device_bytes or r.resident_bytes) for r in _thin(records)),
        generations=_generations(records, shift),
    )


def _parts(steady: Sequence[StepRecord], split: Split, num: float) -> Mapping[str, float]:
    """Return the seconds of a step by part; waiting and communication in a phase do not count for the phase."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts["waiting"] = sum(record.waited for record in steady) / num
    for phase in ("data", "forward", "backward", "update", "other"):
        seconds = sum(getattr(record, phase) for record in steady) / num
        waiting, moving = split.waiting.get(phase, 0.0), split.moving.get(phase, 0.0)
        inside = waiting + moving
        share = min(1.0, seconds / inside) if inside else 0.0  # asynchronous operations may outlast the phase
        parts["waiting"] += waiting * share
        parts["communication"] += moving * share
        parts[phase] = seconds - inside * share
    return parts


def _generations(records: Sequence[StepRecord], shift: float) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for record in records:
        if not found or found[-1][0] != int(record.generation):
            found.append((int(record.generation), record.begin + shift))
    return tuple(found)


def _thin(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return at most MAX_POINTS records, with neighbours merged."""
    thinned = list(records)
    while len(thinned) > MAX_POINTS:
        pairs = [merge(a, b) for a, b in zip(thinned[::2], thinned[1::2], strict=False)]
        thinned = pairs + thinned[len(thinned) - len(thinned) % 2 :]
    return thinned


def _loss_curve(files: Sequence[RankFile]) -> Curve:
    """Return the mean loss by step, over the ranks that have a loss; for a repeated step, the last loss.

    If the newest attempt's first step is unknown, only that attempt is drawn. An earlier attempt whose first step is
    unknown is left out, with all attempts before it.
    """
    curve: Curve = ()
    begins_at = math.inf
    for attempt in sorted({_attempt(file) for file in files}, reverse=True):
        those = [file for file in files if _attempt(file) == attempt]
        if curve and any(file.reached is None for file in those):
            break
        first = min(record.first for file in those for record in file.steps)
        curve = tuple(point for point in _mean_loss(those) if point[0] < begins_at) + curve
        begins_at = min(first, begins_at)
        if any(file.reached is None for file in those):
            break
    return curve


def _mean_loss(files: Sequence[RankFile]) -> Curve:
    """Return the mean loss of one attempt by step. Records within the length of the longest record are combined."""
    # if a step was repeated, its last record counts
    once = [{record.first: record for record in _thin(file.steps)} for file in files]
    records = [record for those in once for record in those.values() if record.num_losses]
    width = max((record.num_steps for record in records), default=1.0)
    found: dict[float, list[StepRecord]] = defaultdict(list)
    for record in records:
        found[math.ceil((record.first + record.num_steps - 1) / width)].append(record)
    curve = []
    for _, those in sorted(found.items()):
        step = max(record.first + record.num_steps - 1 for record in those)
        curve.append((step, sum(r.loss for r in those) / sum(r.num_losses for r in those)))
    return tuple(curve)


def _broken(files: Sequence[RankFile]) -> tuple[int | None, bool]:
    """Return the first step whose loss is not finite, and whether no later loss of that rank is finite."""
    broken = [file.first_broken for file in files if file.first_broken is not None]
    first = min(broken, default=None)
    return first, any(file.first_broken == first and file.last_finite < (first or 0) for file in files)


def _throughput(files: Sequence[RankFile], shifts: Sequence[float]) -> Curve:
    """Return the throughput of all ranks together, by time: samples per second if known, else steps."""
    pairs = list(zip(files, shifts, strict=True))
    counts = any(step.samples for file in files for step in file.steps)
    begin = min((file.steps[0].begin + shift for file, shift in pairs), default=0.0)
    end = max((file.steps[-1].end + shift for file, shift in pairs), default=0.0)
    most = max((len(file.steps) for file in files), default=0)
    num = max(1, min(MAX_POINTS // 2, most // 3))
    width = (end - begin) / num
    if not most or width <= 0:
        return ()
    amounts = [0.0] * num
    present = [0.0] * num  # the number of ranks: ranks may join and leave
    for file, shift in pairs:
        for record in file.steps:
            amount = record.samples if counts else record.num_steps
            span = record.begin + shift - begin, record.end + shift - begin
            _spread(amounts, amount, *span, width)
            _spread(present, (span[1] - span[0]) / width, *span, width)
    rates = [amount / width / (1.0 if counts else max(n, 1e-9)) for amount, n in zip(amounts, present, strict=True)]
    return tuple((begin + (i + 0.5) * width, rate) for i, rate in enumerate(rates))


def _spread(amounts: list[float], amount: float, begin: float, end: float, width: float) -> None:
    """Spread `amount` over the bins that the time from `begin` to `end` covers."""
    length = max(end - begin, 1e-9)
    first, last = int(begin / width), min(int(end / width), len(amounts) - 1)
    for i in range(min(first, last), last + 1):
        overlap = min(end, (i + 1) * width) - max(begin, i * width)
        amounts[i] += amount * max(0.0, overlap) / length
