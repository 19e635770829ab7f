"""How near is a pipeline to the best possible: its speed, the cut that it chooses, the memory that it takes?"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import phalanx
from phalanx.pipeline.schedule import plan_schedule
from phalanx.pipeline.simulate import ideal_efficiency
from phalanx.testing import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import harness  # noqa: E402 - the line above says where it is
from models import LARGE, WORKLOADS, Workload, layouts, unequal  # noqa: E402

TIMEOUT_S = 600.0
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


def measure(steps: int, step: Callable[[], Any], *, uncounted: int = 2) -> float:
    """The median time of a step, after some that nobody counts; between barriers where there are several ranks."""
    times = []
    for turn in range(steps + uncounted):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        step()
        if dist.is_initialized():
            dist.barrier()
        if turn >= uncounted:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _model(workload: Workload) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return workload.build(), workload.data(1)


def one_process(rank: int, world_size: int, workload: Workload, m: int, steps: int) -> float:
    """All micro-batches one after the other."""
    model, _ = _model(workload)
    chunks = workload.data(m).chunk(m)

    def step() -> None:
        for x in chunks:
            (functional.mse_loss(model(x), x) / m).backward()

    return measure(steps, step)


def stages_apart(rank: int, world_size: int, workload: Workload, m: int, steps: int) -> float:
    """Each rank runs its stage of all micro-batches, waiting for nobody: what the machine gives several at once."""
    model, x = _model(workload)
    share = len(model) // world_size
    stage = model[rank * share : (rank + 1) * share]

    def step() -> None:
        for _ in range(m):
            given = x.detach().requires_grad_()
            functional.mse_loss(stage(given), x).backward()

    return measure(steps, step)


def ours(rank: int, world_size: int, workload: Workload, m: int, steps: int, schedule: str) -> float:
    """phalanx.Pipeline."""
    model, _ = _model(workload)
    x = workload.data(m)
    pipe = phalanx.Pipeline(
        model, micro_batches=m, schedule=schedule, loss_fn=functional.mse_loss, balance=_names(model, world_size)
    )
    return measure(steps, lambda: pipe.step(x, target=x))


def _names(model: nn.Sequential, stages: int) -> list[str]:
    return [str(stage * len(model) // stages) for stage in range(1, stages)]


def theirs(rank: int, world_size: int, workload: Workload, m: int, steps: int, schedule: Any) -> float:
    """torch.distributed.pipelining on the same stages."""
    model, _ = _model(workload)
    x, share = workload.data(m), len(model) // world_size
    stage = PipelineStage(model[rank * share : (rank + 1) * share], rank, world_size, torch.device("cpu"))
    plan = schedule(stage, n_microbatches=m, loss_fn=functional.mse_loss)
    given = (x,) if rank == 0 else ()
    last = {"target": x, "losses": []} if rank == world_size - 1 else {}

    def step() -> None:
        if last:
            last["losses"].clear()
        plan.step(*given, **last)

    return measure(steps, step)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Steps a second, as a share of the ideal, of each workload, schedule and number of stages."""
    results: dict[str, Any] = {}
    for stages in args.stages:
        for name in args.workloads:
            case = (WORKLOADS[name], args.micro_batches, args.steps)

            def call(
                fn: Any, ranks: int, *more: Any, backend: str = "phalanx", case: Any = case
            ) -> Callable[[], float]:
                return lambda: max(
                    run_ranks(fn, ranks, *case, *more, backend=backend, timeout=TIMEOUT_S, init=ranks > 1)
                )

            contestants = {
                "one process": call(one_process, 1),
                "stages apart": call(stages_apart, stages),
                **{f"phalanx {s}": call(ours, stages, s) for s in SCHEDULES},
                "phalanx 1f1b over Gloo": call(ours, stages, "1f1b", backend="gloo"),
                "torch gpipe over Gloo": call(theirs, stages, ScheduleGPipe, backend="gloo"),
                "torch 1f1b over Gloo": call(theirs, stages, Schedule1F1B, backend="gloo"),
            }
            samples = harness.interleave(contestants, args.rounds)
            efficiency = ideal_efficiency(stages, args.micro_batches)
            rows = []
            for contestant, times in samples.items():
                of_one = [a / stages / efficiency / b for a, b in zip(samples["one process"], times, strict=True)]
                of_apart = [a / efficiency / b for a, b in zip(samples["stages apart"], times, strict=True)]
                than = [a / b for a, b in zip(samples["torch 1f1b over Gloo"], times, strict=True)]
                rows.append([
                    contestant, harness.format_time(harness.summarise(times).median),
                    *(f"{harness.summarise(share).median:.3f}" for share in (of_one, of_apart, than)),
                ])  # fmt: skip
            harness.print_table(
                ["", "step", "of the ideal", "of what the machine gives", "x torch 1f1b"],
                rows,
                title=f"{name}, {stages} stages, {args.micro_batches} micro-batches (ideal {efficiency:.3f})",
            )
            results[f"{name}, {stages} stages"] = samples
    return results


def _cuts(
    rank: int, world_size: int, costs: tuple[int, ...], rounds: int, steps: int
) -> tuple[list[int], dict[int, list[float]]]:
    x = torch.randn(8 * 64, 256)
    pipes = {
        cut: phalanx.Pipeline(unequal(costs), balance=[cut, len(costs) - cut], loss_fn=functional.mse_loss)
        for cut in range(1, len(costs))
    }
    auto = phalanx.Pipeline(unequal(costs), balance="auto", example=x[:64], loss_fn=functional.mse_loss)
    samples: dict[int, list[float]] = {cut: [] for cut in pipes}
    for turn in range(rounds):  # eleven pipes: few steps of each in a turn, or it takes minutes
        for cut, pipe in pipes.items():
            samples[cut].append(measure(min(steps, 2), partial(pipe.step, x, target=x), uncounted=0 if turn else 2))
    return list(auto.plan.counts), samples


def balance(args: argparse.Namespace) -> dict[str, Any]:
    """The cut that balance="auto" finds, against the best of all, by running all of them; of several layouts."""
    results, ratios = {}, []
    for costs in layouts(args.layouts):
        counts, samples = run_ranks(_cuts, 2, costs, args.rounds, args.steps, timeout=TIMEOUT_S)[0]
        medians = {cut: harness.summarise(times).median for cut, times in samples.items()}
        best = min(medians.values())
        rows = [[f"[{cut}, {len(costs) - cut}]" + "  <- auto" * (cut == counts[0]), harness.format_time(medians[cut]),
                 f"{medians[cut] / best:.3f}"] for cut in sorted(medians)]  # fmt: skip
        ratios.append(medians[counts[0]] / best)
        layout = ", ".join(map(str, costs))
        harness.print_table(
            ["layers per stage", "step", "x the best"], rows, title=f"every cut of layers of costs {layout}"
        )
        results[layout] = {"auto": counts, "samples": {str(cut): times for cut, times in samples.items()}}
    print(f'\nbalance="auto": {statistics.median(ratios):.3f} times the best cut, the median of {len(ratios)} layouts')
    return results


def _peak(step: Callable[[], Any]) -> int:
    """How many bytes of tensors a step has at most beside those that were there before, by the allocator's own events.

    What a rank reads in another's memory it does not allocate.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _pipeline_peak(rank: int, world_size: int, workload: Workload, m: int, schedule: str) -> int:
    model, x = workload.build(), workload.data(m)
    pipe = phalanx.Pipeline(
        model, micro_batches=m, schedule=schedule, balance=_names(model, world_size), loss_fn=functional.mse_loss
    )
    pipe.step(x, target=x)
    return _peak(lambda: pipe.step(x, target=x))


def _implied_peak(rank: int, world_size: int, workload: Workload, m: int, schedule: str) -> int:
    """A stage alone, in a loop that holds as many micro-batches between forward and backward as the schedule says."""
    model, held = workload.build(), plan_schedule(schedule, world_size, m).in_flight(rank)
    share = len(model) // world_size
    stage, x = model[rank * share : (rank + 1) * share], workload.data(1)

    def forward() -> Tensor:
        made: Tensor = stage(x.clone().requires_grad_() if rank else x)
        return functional.mse_loss(made, x) if rank == world_size - 1 else made

    def step() -> None:
        made = [forward() for _ in range(held)]
        while made:
            last = made.pop(0)
            last.backward(torch.ones_like(last))

    step()
    return _peak(step)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """The peak of each stage beside what its schedule implies, measured in the same way."""
    rows, results = [], {}
    for stages in args.stages:
        for workload in LARGE:
            for schedule in ("1f1b", "gpipe"):
                case = (workload, args.micro_batches, schedule)
                # Over Gloo, where all that a rank reads lies in memory of its own, and is counted there.
                found = run_ranks(_pipeline_peak, stages, *case, backend="gloo", timeout=TIMEOUT_S)
                shared = run_ranks(_pipeline_peak, stages, *case, timeout=TIMEOUT_S)
                implied = run_ranks(_implied_peak, stages, *case, timeout=TIMEOUT_S)
                held = [plan_schedule(schedule, stages, args.micro_batches).in_flight(s) for s in range(stages)]
                for at in range(stages):
                    peaks = (implied[at], found[at], shared[at])
                    rows.append([
                        f"{workload.name}, {schedule}, stage {at} of {stages}", str(held[at]),
                        *(f"{peak / 2**20:.0f} MiB" for peak in peaks), f"{found[at] / implied[at]:.2f}",
                    ])  # fmt: skip
                results[f"{workload.name}, {schedule}, {stages} stages"] = {
                    "gloo": found, "phalanx": shared, "implied": implied
                }  # fmt: skip
    harness.print_table(
        ["", "held micro-batches", "implied", "peak over Gloo", "over shared memory", "Gloo / implied"],
        rows,
        title="peak memory of a step",
    )
    return results


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "speed": speed,
    "balance": balance,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of which a round takes the median")
    parser.add_argument("--layouts", type=int, default=3, help="orders of layers of unequal costs")
    harness.add_output_arguments(parser, HERE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = harness.describe_machine()
    results = {part: PARTS[part](args) for part in args.parts}
    print(f"\nwritten to {harness.write_results(args.output, results, machine=machine)}")


if __name__ == "__main__":
    main()
