"""Compare DataParallel with DistributedDataParallel and one process: measure them, and explain the difference."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench.contestants import CONTESTANTS, DDP, DP, ONE, POOL
from phalanx.bench.load import Load
from phalanx.bench.sample import PARTS, Sample, median_of
from phalanx.bench.workloads import WORKLOADS, Workload
from phalanx.collectives.units import format_seconds

_NOTABLE = 0.05  # a part of a time that is smaller is not worth a sentence
_NOTABLE_STOPS = 10  # so many stops in one forward are notable; in a process of its own it has one or none
_BUSY = 0.25  # cores' worth of other programs: from there on, who waits for whom cannot be told
_QUARTILES_FROM = 4  # rounds; of fewer, the extremes say more


@dataclass(frozen=True)
class Comparison:
    """Its samples[contestant] has one entry per round, all of `workload` with `world_size` ranks, replicas or
    threads.

    `others` is how many cores' worth of time other programs took meanwhile; None where the system does not tell.
    """

    workload: Workload
    world_size: int
    samples: dict[str, list[Sample]]
    others: float | None = None

    @property
    def medians(self) -> dict[str, Sample]:
        """Return the medians of each contestant, over the rounds."""
        return {name: median_of(samples) for name, samples in self.samples.items()}

    def range_of(self, contestant: str) -> tuple[float, float]:
        """Return where the steps of most rounds lie: between the quartiles, or the extremes of a few."""
        steps = sorted(sample.step for sample in self.samples[contestant])
        if len(steps) < _QUARTILES_FROM:
            return steps[0], steps[-1]
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
        return low, high

    def title_of(self, contestant: str) -> str:
        """Return the contestant in words."""
        return CONTESTANTS[contestant].title.format(self.world_size)


def compare(
    names: Sequence[str], world_size: int, rounds: int, steps: int, say: Callable[[str], None]
) -> list[Comparison]:
    """Measure every contestant on the workloads `names`, in turns: a round of each, then the next.

    Each round runs in new processes, and none is left, whatever happens. `say` is told what is being measured.

    Raises:
        RankFailed: a process failed.
    """
    load = Load()
    comparisons = [Comparison(WORKLOADS[name], world_size, {one: [] for one in CONTESTANTS}) for name in names]
    for number in range(1, rounds + 1):
        for comparison in comparisons:
            for name, contestant in CONTESTANTS.items():
                say(f"round {number} of {rounds}: {comparison.workload.name}, {comparison.title_of(name)}")
                comparison.samples[name].append(contestant.measure(comparison.workload, world_size, steps))
    return [dataclasses.replace(comparison, others=load.others()) for comparison in comparisons]


def explain(comparison: Comparison, usable_cores: int) -> Iterator[str]:
    """Yield sentences that say where DataParallel's and DistributedDataParallel's time went, from what was measured."""
    medians, count = comparison.medians, comparison.world_size
    dp, ddp = medians[DP], medians[DDP]
    doubts = list(_doubts(comparison, usable_cores))
    yield from doubts
    times = {name: format_seconds(sample.step) for name, sample in medians.items()}
    yield (
        f"A step of DataParallel takes {times[DP]}: {dp.step / ddp.step:.2f} times that of DistributedDataParallel "
        f"({times[DDP]}), and {dp.step / medians[ONE].step:.2f} times that of one process with one thread "
        f"({times[ONE]})."
    )
    extra = dp.parts["replicate"] + dp.parts["scatter"] + dp.parts["threads"]
    yield (
        f"In every step it makes {count} replicas of the model ({format_seconds(dp.parts['replicate'])}), cuts and "
        f"joins the batch ({format_seconds(dp.parts['scatter'])}), and starts and ends threads "
        f"({format_seconds(dp.parts['threads'])}): {extra / dp.step:.0%} of its time. Processes keep "
        "their replica, and read their own part."
    )
    yield f"A replica's forward takes {_forward(dp)} in a thread, and {_forward(ddp)} in a process."
    took, own = dp.parts["waiting"] + dp.parts["computing"], ddp.parts["waiting"] + ddp.parts["computing"]
    if doubts:
        yield "What of that the interpreter (GIL) does, and what other programs do, cannot be told from these rounds."
    elif took > (1 + _NOTABLE) * own and _stands_still(dp, ddp):
        yield (
            f"The threads of one process take turns at the interpreter (GIL): that makes their forward "
            f"{took / own:.1f} times as long."
        )
    else:
        yield "The threads hardly contend for the interpreter (GIL): these operations are long, and run without it."
    pieces = {part: dp.parts.get(part, 0.0) - ddp.parts.get(part, 0.0) for part in PARTS}
    largest = sorted(pieces.items(), key=lambda piece: -abs(piece[1]))[:3]
    listed = ", ".join(f"{PARTS[part]} {_signed(seconds)}" for part, seconds in largest)
    yield f"Where the difference of {_signed(dp.step - ddp.step)} lies, the largest parts first: {listed}."
    best = min(medians, key=lambda name: medians[name].step)
    yield f"Fastest here: {comparison.title_of(best)}, {times[best]}." + (
        f" Threads inside each operation alone take {times[POOL]}." if best != POOL else ""
    )
    if count > usable_cores:
        yield f"There are {usable_cores} cores for {count}: some of the waiting is for a core."


def _doubts(comparison: Comparison, usable_cores: int) -> Iterator[str]:
    """Yield sentences on what keeps the figures from saying anything; there are none if they can be trusted."""
    if comparison.others is not None and comparison.others > _BUSY:
        yield (
            f"This machine was busy: other programs took {comparison.others:.1f} of the {usable_cores} cores "
            "meanwhile, and every figure below has its share of that. Measure again when it is idle."
        )
    (low, high), (ddp_low, ddp_high) = comparison.range_of(DP), comparison.range_of(DDP)
    if max(low, ddp_low) <= min(high, ddp_high) and len(comparison.samples[DP]) > 1:
        yield (
            f"The rounds scatter more than the two differ: a step of DataParallel took {format_seconds(low)} to "
            f"{format_seconds(high)}, one of DistributedDataParallel {format_seconds(ddp_low)} to "
            f"{format_seconds(ddp_high)}. Which is faster cannot be told; take more --rounds, on an idle machine."
        )


def _forward(sample: Sample) -> str:
    stops = "" if sample.stops is None else f", stopping {sample.stops:.0f} times"
    wall = sample.parts["computing"] + sample.parts["waiting"]
    return f"{format_seconds(wall)} ({format_seconds(sample.parts['computing'])} of a processor's time{stops})"


def _stands_still(thread: Sample, process: Sample) -> bool:
    """Return whether a forward in a thread waits, or is stopped, notably more than in a process of its own."""
    waited = thread.parts["waiting"] - process.parts["waiting"]
    stopped = (thread.stops or 0) - (process.stops or 0)
    return waited > _NOTABLE * thread.parts["computing"] or stopped > _NOTABLE_STOPS


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
