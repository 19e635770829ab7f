"""Describe the time of a step: which ranks wait, for which ranks or data, with advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.report.finding import FEW_STEPS, ReportFinding
from phalanx._job.report.measurements import Measurements, RankRun
from phalanx._job.report.units import percent, seconds

DATA_SHARE = 0.10  # the largest share of a step without a finding
OTHER_SHARE = 0.15
UPDATE_SHARE = 0.30
COMMUNICATION_SHARE = 0.20
WAITING_SHARE = 0.20
LATE_OFTEN, LATE_SHARE = 0.6, 0.05  # the least shares of collectives and of step time for which a rank is late
_SLICE_S = 0.004  # how long a preempted rank usually waits for its core
_MOST_NOISE = 0.2  # the largest share of a step by which preemption can explain a late rank


def _timed(run: Measurements) -> Sequence[RankRun]:
    return [rank for rank in run.last_attempt if rank.step_s > 0 and rank.steps >= FEW_STEPS]


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
    chosen, who, share = _grouped(_timed(run), "data", DATA_SHARE)
    if not chosen:
        return
    verb = "wait" if who.startswith("Ranks") else "waits"
    up_to = "up to " if len(chosen) > 1 else ""
    workers = {rank.num_workers for rank in chosen}
    if workers == {0}:
        advice = "load in the background (DataLoader(num_workers=2), it has none)"
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
        chosen, who, share = _grouped(ranks, "waiting", WAITING_SHARE)
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
    if len(ranks) < 2 or run.num_matched < FEW_STEPS:
        return
    for late in run.lateness:
        slow = ranks.get(late.rank)
        if slow is None or late.times < LATE_OFTEN * run.num_matched or late.lead_s < LATE_SHARE * slow.step_s:
            continue
        share = late.lead_s / slow.step_s
        others = [rank for rank in ranks.values() if rank is not slow]
        excess = _excess(slow, others)
        excess_s = max(excess.values())
        often = max(rank.preemptions_per_s or 0.0 for rank in ranks.values())
        # A rank preempted from its core is late, now one, now another; a rank that waits for data has released its
        # core.
        noise_s = min(_MOST_NOISE, _SLICE_S * often) * slow.step_s
        if excess_s < noise_s and excess["data"] < LATE_SHARE * slow.step_s:
            yield ReportFinding(
                "warn",
                f"Ranks are preempted on their cores, up to {often:.0f} times a second (rank {late.rank} "
                f"{slow.preemptions_per_s or 0.0:.0f} times), which is enough for rank {late.rank} to be last to reach "
                f"{percent(late.times / run.num_matched)} of the collectives: something else runs there, "
                "look with `top`.",
                share,
            )
            continue
        if excess_s < LATE_SHARE * slow.step_s:  # it is last, but spends no more time on any activity
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
    """Return how much longer a step of this rank takes than theirs, by activity."""
    own = ("data", "forward", "backward", "update", "other")
    return {part: slow.parts[part] - median(rank.parts[part] for rank in others) for part in own}


def _why_slow(slow: RankRun, others: Sequence[RankRun]) -> str:
    """Return the activity on which the rank spends more time than the others, with advice."""
    advice = {
        "data": "its data is late: give its loader more workers, and check its disk",
        "forward": "its forward takes longer",
        "backward": "its backward takes longer",
        "update": "its update takes longer",
        "other": "it does more between the steps: move its own work (logging, saving) to the background",
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
        return (
            f"{slow.host} may be a slower machine, or busy with something else: give this rank less to do, or move it"
        )
    usual = median(rank.preemptions_per_s or 0.0 for rank in others)
    if (slow.preemptions_per_s or 0.0) > 2 * usual + 20:
        return (
            f"it is preempted {slow.preemptions_per_s:.0f} times a second (the others {usual:.0f}): "
            "something else runs there, look with `top`"
        )
    if len(slow.facts.get("cpus", ())) < max(len(rank.facts.get("cpus", ())) for rank in others):
        return "it has fewer cores than the others"
    return "its batches may be longer than the others', or its core slower; sort samples by length, or balance them"


def _communication(run: Measurements) -> Iterator[ReportFinding]:
    ranks = _timed(run)
    if len(ranks) < 2:
        return
    share = sum(_share(rank, "communication") for rank in ranks) / len(ranks)
    if share < COMMUNICATION_SHARE:
        return
    small = [row for row in run.collectives if row.num_bytes <= 16384 and not row.overlapped]
    per_step = sum(row.count for row in small) / max(1, run.steps)
    several_hosts = len({rank.host for rank in ranks}) > 1
    if per_step > 10:
        advice = f"there are {per_step:.0f} collectives of 16 KiB or less in a step; combine them into few"
    elif several_hosts:
        advice = "average less often (phalanx.DiLoCo), send less (a comm hook: bf16, PowerSGD), or accumulate"
    else:
        advice = "larger batches, or accumulate gradients over several before each exchange"
    yield ReportFinding("warn", f"{percent(share)} of each step is communication between ranks: {advice}.", share)


def _parts_of_one(run: Measurements) -> Iterator[ReportFinding]:
    ranks = _timed(run)
    chosen, who, share = _grouped(ranks, "update", UPDATE_SHARE)
    if chosen:
        verb = "spend" if who.startswith("Ranks") else "spends"
        advice = "take the fused optimizer (fused=True)"
        if len(ranks) > 1:
            advice += ", or share the work (phalanx.ZeroRedundancyOptimizer)"
        yield ReportFinding("warn", f"{who} {verb} {percent(share)} of each step in the optimizer: {advice}.", share)
    chosen, who, share = _grouped(ranks, "other", OTHER_SHARE)
    if chosen:
        verb = "spend" if who.startswith("Ranks") else "spends"
        yield ReportFinding(
            "warn",
            f"{who} {verb} {percent(share)} of the time outside of the steps: evaluation, callbacks, logging, "
            "saving. Do these less often; torch.save can go to the background (phalanx.CheckpointManager).",
            share,
        )


def _processors(run: Measurements) -> Iterator[ReportFinding]:
    ranks = [rank for rank in _timed(run) if rank.cpu_share is not None]
    crowded: dict[tuple[int, int, int], list[str]] = {}  # by threads, cores, and what to set: hosts
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
            f"lost it {often:.0f} times a second. End them: the times in this report are distorted.",
            0.5,
        )


def _name_hosts(hosts: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and 6 hosts more`."""
    if len(hosts) <= 2:
        return " and ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} and {len(hosts) - 2} host{'s' * (len(hosts) > 3)} more"


def _computing_share(rank: RankRun) -> float:
    return sum(_share(rank, part) for part in ("forward", "backward", "update"))


def _not_seen(run: Measurements) -> Iterator[ReportFinding]:
    ranks = run.last_attempt
    backends = {str(rank.facts.get("backend", "none")) for rank in ranks}
    known = any("phalanx" in backend for backend in backends)  # its ranks have run no collectives in the steps
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


CHECKS: tuple[Callable[[Measurements], Iterator[ReportFinding]], ...] = (
    _data,
    _waits,
    _stragglers,
    _communication,
    _parts_of_one,
    _processors,
    _long_steps,
    _not_seen,
)
