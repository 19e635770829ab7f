"""Derive findings from a run's measurements for people who want it faster, or repaired: sentences with advice.

The functions are pure: measurements go in, sentences come out, the worst first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.report.finding import FEW_STEPS, ReportFinding, Severity
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.time_findings import CHECKS as TIME_CHECKS
from phalanx._job.report.units import percent, seconds, size, three_digits

_ORDER: dict[Severity, int] = {"bad": 0, "warn": 1, "note": 2, "good": 3}


def find(run: Measurements) -> list[ReportFinding]:
    """Return all that is worth telling of a run; there is at least one finding."""
    found = [finding for check in _CHECKS for finding in check(run)]
    if not any(finding.severity in ("bad", "warn") for finding in found) and run.steps >= FEW_STEPS:
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
            "`phalanx run` itself was killed, and could not say how the job ended: read the system's log (`dmesg`) for "
            "the reason, memory first.",
            9,
        )
    elif run.end == "running":
        yield ReportFinding("note", "The run had not ended when this was written.", 9)
    elif run.end == "stopped":
        yield ReportFinding(
            "warn",
            f"The run was {run.end_text or 'stopped'}, {_how_far(run)}. A run that saves (phalanx.CheckpointManager) "
            "resumes from its last checkpoint.",
            9,
        )
    failures = [event for event in run.events if event.kind == "failure"]
    for event in failures[:1] if run.end == "failed" else ():
        where = _where_it_was(run, event.rank)
        yield ReportFinding("bad", f"Rank {event.rank} failed first: {event.text}{where}. Start with its log.", 8)
    losses = [event for event in run.events if event.kind in ("loss", "host lost")]
    if losses:
        whom = name_ranks(sorted({event.rank for event in losses if event.rank is not None}))
        whom = whom[:1].upper() + whom[1:]
        times = f" ({len(losses)} losses)" if len(losses) > 1 else ""
        yield ReportFinding(
            "warn", f"{whom} {'was' if len(losses) == 1 else 'were'} lost, and the others continued{times}: "
            f"{losses[0].text}.", 7,
        )  # fmt: skip
    restarts = max((rank.attempt for rank in run.ranks), default=0)
    if restarts:
        counted = "" if any(rank.first_number != 1 for rank in run.newest) else (
            " Steps and loss are the last attempt's, from its own first step on: it has not reported where it resumed."
        )  # fmt: skip
        yield ReportFinding(
            "warn",
            f"The job was restarted {_times(restarts)}; a restart repeats the steps since the last "
            "checkpoint: save more often, or survive the loss without one (phalanx.elastic)."
            f"{counted}",
            6,
        )


def _lost_records(run: Measurements) -> Iterator[ReportFinding]:
    recorded = {(rank.host.partition("#")[0], rank.pid) for rank in run.ranks}
    missing: dict[str, list[int]] = {}
    for event in run.events:
        host = event.host.partition(" ")[0].partition("#")[0]  # of several with one name it is "name#1 (address)"
        if event.host and event.rank is not None and (host, event.pid) not in recorded:
            missing.setdefault(event.host, []).append(event.rank)
    for host, ranks in missing.items():
        yield ReportFinding(
            "note",
            f"What {name_ranks(sorted(ranks))} had recorded went with the host {host}: numbers and curves are those of "
            "the other processes. If that host is there again, `phalanx report` shows the rest from the folder there.",
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
            "No training step was seen: a step is a backward and an optimizer's step, in the main thread. A loop "
            "without them marks its own with `phalanx.report.step()`.",
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
            f"The loss is not a number {when}: lower the learning rate, clip the gradients "
            "(max_norm), and look at the batch of that step.",
            5,
        )
    elif len(run.loss) >= 20:
        losses = [loss for _, loss in run.loss]
        tenth = max(1, len(losses) // 10)
        first, last = median(losses[:tenth]), median(losses[-tenth:])
        best = min(median(losses[i : i + tenth]) for i in range(0, len(losses) - tenth + 1, tenth))
        gained_back = last - best > 0.1 * (
            first - best
        )  # near its least value noise alone makes it half as large again
        # Three times the difference of two such medians by chance, estimated from the differences of successive losses.
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
                "tensors, a list of losses with their graph most often (append loss.item()).",
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
                f"The ranks of {rank.host} have taken {percent(total[rank.host] / there)} of its memory: a smaller "
                "batch, or phalanx.ZeroRedundancyOptimizer, before the system kills one.",
                0.6,
            )
            return
    if len(peaks) > 1 and max(peaks.values()) > 1.5 * median(peaks.values()) and max(peaks.values()) > 2**30:
        most = max(peaks, key=lambda rank: peaks[rank])
        yield ReportFinding(
            "note",
            f"Rank {most} takes {size(peaks[most])} of memory, the others {size(median(peaks.values()))}: what it "
            "alone holds decides how large a batch may be.",
        )


def _slow_start(run: Measurements) -> Iterator[ReportFinding]:
    waits = [r.first_step - r.begin for r in run.last_attempt if r.first_step is not None and not r.attempt]
    if waits and run.duration_s > 20 and max(waits) > 0.3 * run.duration_s:
        yield ReportFinding(
            "note",
            f"The script took {seconds(max(waits))} to its first step, {percent(max(waits) / run.duration_s)} of the "
            "run: data that is prepared before it can be prepared once and kept (a memory-mapped file).",
        )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


_CHECKS: tuple[Callable[[Measurements], Iterator[ReportFinding]], ...] = (
    _how_it_ended, _lost_records, _no_steps, _loss, *TIME_CHECKS, _slowing_down, _memory, _slow_start,
)  # fmt: skip
