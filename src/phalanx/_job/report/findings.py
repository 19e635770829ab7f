"""Derive findings from a run's measurements: sentences with advice on how to fix the run or make it faster.

The functions are pure: measurements go in, sentences come out, the worst first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.report.measurements import Measurements, RankRun, RunEvent
from phalanx._job.report.units import percent, seconds, size, three_digits

_ORDER: dict[Severity, int] = {"bad": 0, "warn": 1, "note": 2, "good": 3}


Severity = Literal["bad", "warn", "note", "good"]

_FEW_STEPS = 10  # runs with fewer steps do not show the speed


@dataclass(frozen=True)
class ReportFinding:
    """A `ReportFinding` is a sentence, its severity, and its weight among others: a share of time, if one is known."""

    severity: Severity
    text: str
    weight: float = 0.0


def find(run: Measurements) -> list[ReportFinding]:
    """Return the findings on a run; a short run may have none."""
    found = [finding for check in _CHECKS for finding in check(run)]
    if not any(finding.severity in ("bad", "warn") for finding in found) and run.steps >= _FEW_STEPS:
        found.append(ReportFinding("good", _nothing_wrong(run)))
    return sorted(found, key=lambda finding: (_ORDER[finding.severity], -finding.weight))


def _nothing_wrong(run: Measurements) -> str:
    computing = [
        sum(rank.parts[part] for part in ("forward", "backward", "update")) / rank.step_s
        for rank in run.last_attempt
        if rank.step_s
    ]
    return f"Nothing stands out: the ranks compute for {percent(sum(computing) / max(1, len(computing)))} of each step."


# -- how it ended ------------------------------------------------------------------------------------------------------


def _how_it_ended(run: Measurements) -> Iterator[ReportFinding]:
    if run.end == "killed":
        yield ReportFinding(
            "bad",
            "`phalanx run` itself was killed, so it is unknown how the job ended. Look for the reason in the system "
            "log (`dmesg`); most often, memory ran out.",
            9,
        )
    elif run.end == "running":
        yield ReportFinding("note", "The run had not ended when this report was written.", 9)
    elif run.end == "stopped":
        yield ReportFinding(
            "warn",
            f"The run was {run.end_text or 'stopped'}, {_how_far(run)}. A run that saves (phalanx.CheckpointManager) "
            "resumes from its last checkpoint.",
            9,
        )
    last_begin = max((n + 1 for n, event in enumerate(run.events) if event.kind == "restart"), default=0)
    failures = [event for event in run.events[last_begin:] if event.kind in ("failure", "host lost")]
    if failures and run.end == "failed":
        first = failures[0]
        if first.kind == "host lost":
            lost = _lost_ranks([event for event in failures if event.text == first.text])
            yield ReportFinding("bad", f"{lost} lost, which ended the job: {first.text}.", 8)
        else:
            where = _where_it_was(run, first.rank)
            yield ReportFinding("bad", f"Rank {first.rank} failed first: {first.text}{where}. Start with its log.", 8)
    losses = [event for event in run.events if event.kind == "loss"]
    if losses:
        times = f" ({len(losses)} losses)" if len(losses) > 1 else ""
        yield ReportFinding(
            "warn", f"{_lost_ranks(losses)} lost, and the others continued{times}: "
            f"{losses[0].text}.", 7,
        )  # fmt: skip
    restarts = max((rank.attempt for rank in run.ranks), default=0)
    if restarts:
        counted = "" if any(rank.first_number != 1 for rank in run.newest) else (
            " Steps and loss cover only the last attempt, counted from 1: the script did not report where it resumed."
        )  # fmt: skip
        yield ReportFinding(
            "warn",
            f"The job was restarted {_times(restarts)}; a restart repeats the steps since the last "
            "checkpoint: save more often, or use phalanx.elastic, which survives a lost rank without a restart."
            f"{counted}",
            6,
        )


def _lost_ranks(events: Sequence[RunEvent]) -> str:
    """Return, for example, `Ranks 2, 3 were`."""
    ranks = sorted({event.rank for event in events if event.rank is not None})
    who = name_ranks(ranks)
    return f"{who[:1].upper()}{who[1:]} {'was' if len(ranks) == 1 else 'were'}"


def _lost_records(run: Measurements) -> Iterator[ReportFinding]:
    recorded = {(rank.host.partition("#")[0], rank.pid) for rank in run.ranks}
    missing: dict[str, list[int]] = {}
    for event in run.events:
        host = event.host.partition(" ")[0].partition("#")[0]  # if hosts share a name, "name#1 (address)"
        if event.host and event.rank is not None and (host, event.pid) not in recorded:
            missing.setdefault(event.host, []).append(event.rank)
    for host, ranks in missing.items():
        yield ReportFinding(
            "note",
            f"The records of {name_ranks(sorted(ranks))} were lost with the host {host}: numbers and curves cover the "
            "other processes. Once that host is back, `phalanx report` shows the rest from its copy of the folder.",
            7,
        )


def _how_far(run: Measurements) -> str:
    return f"after step {run.steps:,}" if run.steps else "before the first step was done"


def _where_it_was(run: Measurements, rank: int | None) -> str:
    known = sorted((one for one in run.newest if one.rank == rank), key=lambda one: (one.reached, one.end))[-1:]
    if not known or known[0].ended:
        return ""
    phase = {"data": "waiting for data", "other": "between two steps"}.get(
        known[0].last_phase, f"in {known[0].last_phase}"
    )
    return f"; it was {phase} of step {known[0].reached + 1:,}" if phase.startswith("in ") else f"; it was {phase}"


def _no_steps(run: Measurements) -> Iterator[ReportFinding]:
    if not run.steps and run.end != "failed":
        yield ReportFinding(
            "note",
            "No training step was recorded: a step is a backward and an optimizer's step, in the main thread. A loop "
            "without these marks its steps with `phalanx.report.step()`.",
        )


# -- loss --------------------------------------------------------------------------------------------------------------


def _loss(run: Measurements) -> Iterator[ReportFinding]:
    shown = [step for step, loss in run.loss if not math.isfinite(loss)]
    broken: float | None = run.broken_step or next(iter(shown), None)
    if broken is not None:
        stays = run.stays_broken if run.broken_step else len(shown) == sum(step >= broken for step, _ in run.loss)
        when = f"from step {broken:,.0f} on" if stays else f"at step {broken:,.0f}"
        yield ReportFinding(
            "bad",
            f"The loss is not finite {when}: lower the learning rate, clip the gradients "
            "(max_norm), and look at the batch of that step.",
            5,
        )
    elif len(run.loss) >= 20:
        losses = [loss for _, loss in run.loss]
        tenth = max(1, len(losses) // 10)
        first, last = median(losses[:tenth]), median(losses[-tenth:])
        best = min(median(losses[i : i + tenth]) for i in range(0, len(losses) - tenth + 1, tenth))
        # near its minimum, noise alone can raise the loss by half
        gained_back = last - best > 0.1 * (first - best)
        # Three times the chance difference of two such medians, estimated from the differences of successive losses.
        noise = 4.5 * median(abs(a - b) for a, b in pairwise(losses)) / math.sqrt(tenth)
        if last - best <= noise:
            return
        if (first > 0 and last > first + noise) or (last > 0 and best > 0 and last > 1.5 * best and gained_back):
            yield ReportFinding(
                "warn",
                f"The loss rises: {three_digits(last)} at the end, {three_digits(min(best, first))} before. Lower the "
                "learning rate, or stop earlier.",
                0.3,
            )


# -- over time ---------------------------------------------------------------------------------------------------------


def _slowing_down(run: Measurements) -> Iterator[ReportFinding]:
    rates = [value for _, value in run.throughput][1:-1]
    if len(rates) < 12 or run.steps < 40:
        return
    quarter = len(rates) // 4
    first, last = median(rates[:quarter]), median(rates[-quarter:])
    if first > 0 and last < 0.8 * first:
        yield ReportFinding(
            "warn",
            f"The run became slower: {percent(1 - last / first)} fewer {'samples' if run.has_samples else 'steps'} a "
            "second at its end than at its beginning. Look for what grows with time: lists of tensors with their "
            "graph, a processor that heats up, another job.",
            1 - last / first,
        )


def _memory(run: Measurements) -> Iterator[ReportFinding]:
    for rank in run.last_attempt:
        curve = [value for _, value in rank.memory_curve]
        if len(curve) < 16:
            continue
        half = curve[len(curve) // 2 :]
        grown = half[-1] - half[0]
        steady = sum(b >= a for a, b in pairwise(half)) > 0.9 * (len(half) - 1)
        if steady and grown > 0.05 * half[0] and grown > 32 * 2**20:
            steps = max(1.0, rank.steps / 2)
            yield ReportFinding(
                "warn",
                f"The memory of rank {rank.rank} grows all the time, {size(grown / steps)} a step: something keeps "
                "tensors, most often a list of losses with their graphs (append loss.item()).",
                0.4,
            )
            return
    peaks = {rank.rank: rank.peak_bytes for rank in run.last_attempt}
    total: dict[str, float] = {}
    for rank in run.last_attempt:
        total[rank.host] = total.get(rank.host, 0.0) + rank.peak_bytes - rank.shared_bytes
    for rank in run.last_attempt:
        there = float(rank.facts.get("memory_bytes", 0))
        if there and total.get(rank.host, 0.0) > 0.9 * there:
            yield ReportFinding(
                "warn",
                f"The ranks of {rank.host} have used {percent(total[rank.host] / there)} of its memory: use a "
                "smaller batch or phalanx.ZeroRedundancyOptimizer before the kernel kills a rank.",
                0.6,
            )
            return
    if len(peaks) > 1:
        most = max(peaks, key=lambda rank: peaks[rank])
        others = median(peak for rank, peak in peaks.items() if rank != most)
        if peaks[most] > 1.5 * others and peaks[most] > 2**30:
            yield ReportFinding(
                "note",
                f"Rank {most} uses {size(peaks[most])} of memory, and the median of the others is {size(others)}: "
                f"rank {most} limits the batch size.",
            )


def _slow_start(run: Measurements) -> Iterator[ReportFinding]:
    waits = [r.first_step - r.begin for r in run.last_attempt if r.first_step is not None and not r.attempt]
    if waits and run.duration_s > 20 and max(waits) > 0.3 * run.duration_s:
        yield ReportFinding(
            "note",
            f"The script took {seconds(max(waits))} to its first step, {percent(max(waits) / run.duration_s)} of the "
            "run: if it prepares data first, do that once, and keep the result (in a memory-mapped file).",
        )


# -- where the time of a step goes: who waits, for what, for whom, and what to do about it -----------------------------

_DATA_SHARE = 0.10  # the share of a step from which an activity is reported
_OTHER_SHARE = 0.15
_UPDATE_SHARE = 0.30
_COMMUNICATION_SHARE = 0.20
_WAITING_SHARE = 0.20
_LATE_OFTEN, _LATE_SHARE = (
    0.6,
    0.05,
)  # a late rank is last in this share of collectives, and delays by this share of a step
_SLICE_S = 0.004  # how long a preempted rank usually waits for its core
_MOST_NOISE = 0.2  # the largest share of a step by which preemption can explain a late rank


def _timed(run: Measurements) -> Sequence[RankRun]:
    return [rank for rank in run.last_attempt if rank.step_s > 0 and rank.steps >= _FEW_STEPS]


def _share(rank: RankRun, part: str) -> float:
    return rank.parts.get(part, 0.0) / rank.step_s


def _grouped(ranks: Sequence[RankRun], part: str, least: float) -> tuple[list[RankRun], str, float]:
    """Return the ranks whose share of `part` is at least `least`, their names as text, and the largest share."""
    chosen = [rank for rank in ranks if _share(rank, part) >= least]
    if not chosen:
        return [], "", 0.0
    who = "Every rank" if len(chosen) == len(ranks) > 1 else name_ranks([rank.rank for rank in chosen])
    return chosen, who[:1].upper() + who[1:], max(_share(rank, part) for rank in chosen)


def _data(run: Measurements) -> Iterator[ReportFinding]:
    chosen, who, share = _grouped(_timed(run), "data", _DATA_SHARE)
    if not chosen:
        return
    verb = "wait" if who.startswith("Ranks") else "waits"
    up_to = "up to " if len(chosen) > 1 else ""
    workers = {rank.num_workers for rank in chosen}
    if workers == {0}:
        advice = "load in the background with DataLoader(num_workers=2) (now 0)"
    elif None in workers:
        advice = "load in the background, ahead of the step"
    else:
        advice = f"more DataLoader workers (now {min(w for w in workers if w is not None)}), or cheaper samples"
    yield ReportFinding("warn", f"{who} {verb} {up_to}{percent(share)} of each step for data: {advice}.", share)


def _waits(run: Measurements) -> Iterator[ReportFinding]:
    """Yield findings about waits that a pipeline or a parameter server's trainer recorded."""
    for whom, name, advice in (
        ("stages", "other stages", "more micro-batches, or another schedule: `phalanx explain pipeline` draws it"),
        ("servers", "parameter servers", "more servers, larger batches, or synchronous=False"),
    ):
        ranks = [rank for rank in _timed(run) if whom in rank.facts.get("waits_for", ())]
        chosen, who, share = _grouped(ranks, "waiting", _WAITING_SHARE)
        if chosen:
            verb = "wait" if who.startswith("Ranks") else "waits"
            up_to = "up to " if len(chosen) > 1 else ""
            yield ReportFinding(
                "warn", f"{who} {verb} {up_to}{percent(share)} of each step for {name}: {advice}.", share
            )


def _stragglers(run: Measurements) -> Iterator[ReportFinding]:
    ranks = {rank.rank: rank for rank in _timed(run)}
    if any("stages" in rank.facts.get("waits_for", ()) for rank in ranks.values()):
        return  # a pipeline's first stage has the last backward, so the others always wait for it at the end
    if len(ranks) < 2 or run.num_matched < _FEW_STEPS:
        return
    for late in run.lateness:
        slow = ranks.get(late.rank)
        if slow is None or late.times < _LATE_OFTEN * run.num_matched or late.lead_s < _LATE_SHARE * slow.step_s:
            continue
        share = late.lead_s / slow.step_s
        others = [rank for rank in ranks.values() if rank is not slow]
        excess = _excess(slow, others)
        excess_s = max(excess.values())
        often = max(rank.preemptions_per_s or 0.0 for rank in ranks.values())
        # Preemption makes different ranks late at different times. A rank that waits for data has released its core.
        noise_s = min(_MOST_NOISE, _SLICE_S * often) * slow.step_s
        if excess_s < noise_s and excess["data"] < _LATE_SHARE * slow.step_s:
            yield ReportFinding(
                "warn",
                f"Ranks are preempted on their cores, up to {often:.0f} times a second (rank {late.rank} "
                f"{slow.preemptions_per_s or 0.0:.0f} times), which is enough for rank {late.rank} to be last to reach "
                f"{percent(late.times / run.num_matched)} of the collectives: other processes use "
                "these cores; check with `top`.",
                share,
            )
            continue
        if excess_s < _LATE_SHARE * slow.step_s:  # it is last, but spends no more time on any activity
            continue
        yield ReportFinding(
            "warn",
            f"Rank {late.rank} on {slow.host} is the straggler: it is last to reach "
            f"{percent(late.times / run.num_matched)} of the collectives, and the others wait {percent(share)} of each "
            "step for it alone; "
            f"{_why_slow(slow, others)}.",
            share + 0.01,
        )


def _excess(slow: RankRun, others: Sequence[RankRun]) -> dict[str, float]:
    """Return how much longer a step of this rank takes than the others' median, by activity."""
    own = ("data", "forward", "backward", "update", "other")
    return {part: slow.parts[part] - median(rank.parts[part] for rank in others) for part in own}


def _why_slow(slow: RankRun, others: Sequence[RankRun]) -> str:
    """Return the activity on which the rank spends more time than the others, with advice."""
    advice = {
        "data": "its data is late: give its loader more workers, and check its disk",
        "forward": "its forward takes longer",
        "backward": "its backward takes longer",
        "update": "its update takes longer",
        "other": "it does more between the steps: move that work (logging, saving) to the background",
    }
    excess = _excess(slow, others)
    part = max(excess, key=lambda name: excess[name])
    how = f"{seconds(slow.parts[part])} a step against {seconds(median(r.parts[part] for r in others))}"
    text = f"{advice[part]} ({how})"
    if part in ("forward", "backward", "update"):
        text += f": {_why_computing_is_slow(slow, others)}"
    return text


def _why_computing_is_slow(slow: RankRun, others: Sequence[RankRun]) -> str:
    if slow.host not in {rank.host for rank in others}:
        return f"{slow.host} may be a slower machine, or busy with other work: give this rank less work, or move it"
    usual = median(rank.preemptions_per_s or 0.0 for rank in others)
    if (slow.preemptions_per_s or 0.0) > 2 * usual + 20:
        return (
            f"it is preempted {slow.preemptions_per_s:.0f} times a second (the others {usual:.0f}): "
            "other processes use its cores; check with `top`"
        )
    if len(slow.facts.get("cpus", ())) < max(len(rank.facts.get("cpus", ())) for rank in others):
        return "it has fewer cores than the others"
    return "its batches may be longer than the others', or its core slower; sort samples by length, or balance them"


def _communication(run: Measurements) -> Iterator[ReportFinding]:
    ranks = _timed(run)
    if len(ranks) < 2:
        return
    share = sum(_share(rank, "communication") for rank in ranks) / len(ranks)
    if share < _COMMUNICATION_SHARE:
        return
    small = [row for row in run.collectives if row.num_bytes <= 16384 and not row.overlapped]
    per_step = sum(row.count for row in small) / max(1, run.steps)
    several_hosts = len({rank.host for rank in ranks}) > 1
    if per_step > 10:
        advice = f"a step has {per_step:.0f} collectives of 16 KiB or less; combine them"
    elif several_hosts:
        advice = "average less often (phalanx.DiLoCo), send less (a comm hook: bf16, PowerSGD), or accumulate gradients"
    else:
        advice = "use larger batches, or accumulate gradients over several batches before each exchange"
    yield ReportFinding("warn", f"{percent(share)} of each step is communication between ranks: {advice}.", share)


def _parts_of_one(run: Measurements) -> Iterator[ReportFinding]:
    ranks = _timed(run)
    chosen, who, share = _grouped(ranks, "update", _UPDATE_SHARE)
    if chosen:
        verb = "spend" if who.startswith("Ranks") else "spends"
        advice = "use the fused optimizer (fused=True)"
        if len(ranks) > 1:
            advice += ", or share the work (phalanx.ZeroRedundancyOptimizer)"
        yield ReportFinding(
            "warn", f"{who} {verb} up to {percent(share)} of each step in the optimizer: {advice}.", share
        )
    chosen, who, share = _grouped(ranks, "other", _OTHER_SHARE)
    if chosen:
        verb = "spend" if who.startswith("Ranks") else "spends"
        yield ReportFinding(
            "warn",
            f"{who} {verb} up to {percent(share)} of the time outside of the steps: evaluation, callbacks, logging, "
            "saving. Do these less often; phalanx.CheckpointManager can save in the background.",
            share,
        )


def _processors(run: Measurements) -> Iterator[ReportFinding]:
    ranks = [rank for rank in _timed(run) if rank.cpu_share is not None]
    crowded: dict[tuple[int, int, int], list[str]] = {}  # (threads, cores, threads to set) -> hosts
    starved: dict[str, list[RankRun]] = {}
    for host in sorted({rank.host for rank in ranks}):
        here = [rank for rank in ranks if rank.host == host]
        cores = int(here[0].facts.get("cores", 0))
        threads = sum(int(rank.facts.get("threads", 1)) for rank in here)
        if cores and threads > cores:
            crowded.setdefault((threads, cores, max(1, cores // len(here))), []).append(host)
            continue
        thrown_off = [
            rank
            for rank in here
            if (rank.preemptions_per_s or 0) > 20 and (rank.cpu_share or 0) < 0.7 * _computing_share(rank)
        ]
        if thrown_off:
            starved[host] = thrown_off
    for (threads, cores, fitting), hosts in crowded.items():
        each = " each" if len(hosts) > 1 else ""
        yield ReportFinding(
            "warn",
            f"On {_name_hosts(hosts)} {threads} threads{each} compute on {cores} cores: set "
            f"OMP_NUM_THREADS={fitting}, or start fewer ranks.",
            0.2,
        )
    if starved:
        all_starved = [rank for here in starved.values() for rank in here]
        least = min(rank.cpu_share or 0.0 for rank in all_starved)
        often = max(rank.preemptions_per_s or 0.0 for rank in all_starved)
        yield ReportFinding(
            "warn",
            f"On {_name_hosts(list(starved))} other programs take the cores: "
            f"{name_ranks(sorted(rank.rank for rank in all_starved))} got one for {percent(least)} of the time, and "
            f"lost it {often:.0f} times a second. Stop those programs: they distort the times in this report.",
            0.5,
        )


def _name_hosts(hosts: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and 6 more hosts`."""
    if len(hosts) <= 2:
        return " and ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} and {len(hosts) - 2} more host{'s' * (len(hosts) > 3)}"


def _computing_share(rank: RankRun) -> float:
    return sum(_share(rank, part) for part in ("forward", "backward", "update"))


def _not_seen(run: Measurements) -> Iterator[ReportFinding]:
    ranks = run.last_attempt
    backends = {str(rank.facts.get("backend", "none")) for rank in ranks}
    known = any("phalanx" in backend for backend in backends)  # then the ranks have run no collectives in the steps
    if len(ranks) > 1 and run.steps and not run.num_matched and not known:
        yield ReportFinding(
            "note",
            f"The waits and messages of ranks are unknown: the backend was {', '.join(sorted(backends))}, and only "
            "`phalanx` keeps a record of its operations.",
        )


def _long_steps(run: Measurements) -> Iterator[ReportFinding]:
    for rank in _timed(run)[:1]:
        if rank.longest_s > 10 * rank.step_s and rank.longest_s > 1.0:
            yield ReportFinding(
                "note",
                f"The longest step took {seconds(rank.longest_s)}, {rank.longest_s / rank.step_s:.0f} times the mean: "
                "a save, an evaluation, or a new epoch's workers (persistent_workers=True).",
            )


_TIME_CHECKS: tuple[Callable[[Measurements], Iterator[ReportFinding]], ...] = (
    _data,
    _waits,
    _stragglers,
    _communication,
    _parts_of_one,
    _processors,
    _long_steps,
    _not_seen,
)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


_CHECKS: tuple[Callable[[Measurements], Iterator[ReportFinding]], ...] = (
    _how_it_ended, _lost_records, _no_steps, _loss, *_TIME_CHECKS, _slowing_down, _memory, _slow_start,
)  # fmt: skip
