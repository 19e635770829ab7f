"""What does offload=True cost on the CPU, and what of it does each further rank hold?"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import phalanx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import (  # noqa: E402 - the line above says where it is
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    plan_rounds,
    print_table,
    summarise,
    write_results,
)

WIDTH, LAYERS, BATCH = 1024, 6, 16
PARTS = ("forward and backward", "optimizer", "step")
CONTESTANTS = ("zero", "offload", "torch zero")
PEER = "zero"
Step = Callable[[], tuple[float, float]]


def build() -> nn.Module:
    """A perceptron of six million parameters, whose step is as much update as backward."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make(name: str, gloo: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if name == "torch zero":
        model: nn.Module = nn.parallel.DistributedDataParallel(
            build(), process_group=gloo, gradient_as_bucket_view=True
        )
        return model, TorchZero(model.parameters(), torch.optim.AdamW, process_group=gloo, **options)
    model = phalanx.DistributedDataParallel(build())
    options["offload"] = name == "offload"
    return model, phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Step:
    def step() -> tuple[float, float]:
        begun = time.perf_counter()
        model(inputs).square().mean().backward()
        dist.barrier()  # so that the wait for the slower rank is not the optimizer's
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return middle - begun, time.perf_counter() - middle

    return step


def timed(rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part of a step, by contestant, round by round."""
    torch.set_num_threads(1)
    with phalanx.init() as job:
        gloo = dist.new_group(backend="gloo")
        pairs = {name: make(name, gloo) for name in CONTESTANTS}
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(job.rank))
        contestants = {name: step_of(*pair, inputs) for name, pair in pairs.items()}
        for step in contestants.values():
            for _ in range(3):
                step()
        bits = {name: [p.detach().clone() for p in model.parameters()] for name, (model, _) in pairs.items()}
        for one, other in zip(bits["offload"], bits["zero"], strict=True):
            assert torch.equal(one, other), "the weights must be the same before anything is timed"
        samples: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in CONTESTANTS}
        for order in plan_rounds(list(contestants), rounds):
            for name in order:
                dist.barrier()
                taken = [contestants[name]() for _ in range(steps)]
                first, second = (statistics.mean(one[part] for one in taken) for part in range(2))
                for part, seconds in zip(PARTS, (first, second, first + second), strict=True):
                    samples[name][part].append(seconds)
        pairs.clear()
        contestants.clear()
        return samples


def held(offload: bool) -> int:
    """Bytes of this rank's share of the job's memory, with each shared page divided among its holders."""
    with phalanx.init():
        model = build().bfloat16() if offload else build()
        optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, offload=offload, fused=True)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        found, shared = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split(maxsplit=5)
            if "-" in first:
                shared = len(rest) > 4 and "phalanx-heap" in rest[4]
            elif first == "Pss:" and shared:
                found += int(rest[0]) * 1024
        dist.barrier()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="per round")
    parser.add_argument("--memory-of", nargs="*", type=int, default=[1, 2, 4], help="jobs of so many ranks")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = describe_machine()
    launch = functools.partial(phalanx.launch, no_affinity=True)
    samples = launch(timed, (arguments.rounds, arguments.steps), nproc_per_node=arguments.ranks)[0]
    rows = []
    for name in CONTESTANTS:
        ratios = (one / peer for one, peer in zip(samples[name]["step"], samples[PEER]["step"], strict=True))
        times = (format_time(summarise(samples[name][part]).median) for part in PARTS)
        rows.append([name, *times, format_ratio(statistics.median(ratios))])
    print_table(["", *PARTS, f"step, of {PEER}"], rows, title=f"{arguments.ranks} ranks, float32")
    memory = {
        ranks: {name: sum(launch(held, (offload,), nproc_per_node=ranks)) / 1e6 for name, offload in
                (("zero, float32", False), ("offload, bfloat16", True))}
        for ranks in arguments.memory_of
    }  # fmt: skip
    rows = [[f"{ranks} ranks", *(f"{megabytes:,.0f} MB" for megabytes in by.values())] for ranks, by in memory.items()]
    if rows:
        print_table(["", *next(iter(memory.values()))], rows, title="in the host's shared memory, all ranks together")
    write_results(arguments.output, {"seconds": samples, "shared_megabytes": memory}, machine=machine)


if __name__ == "__main__":
    main()
