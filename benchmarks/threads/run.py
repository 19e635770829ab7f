"""Threads or processes? A step of DataParallel against one of DistributedDataParallel, and of one process."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import phalanx
from phalanx.testing import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import harness  # noqa: E402 - the line above says where it is

# Layers, their width, and the samples of a step: time goes into Python, or into arithmetic.
WORKLOADS = {"many small layers": (120, 32, 64), "few large layers": (4, 1024, 256)}
WARM_UP = 5

Sample = tuple[float, float]  # seconds of a step, and the sum of the weights after all of them


def _model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def _train(model: nn.Module, inputs: Tensor, steps: int) -> Sample:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    weights = sum(parameter.detach().abs().sum().item() for parameter in model.parameters())
    return statistics.median(seconds[WARM_UP:]), weights


def _rank(rank: int, world_size: int, workload: str, steps: int, threads: int, replicas: int) -> Sample:
    torch.set_num_threads(threads)
    layers, width, batch = WORKLOADS[workload]
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(1)).chunk(world_size)[rank]
    model = _model(layers, width)
    if world_size > 1:
        model = phalanx.DistributedDataParallel(model)
    elif replicas > 1:
        model = phalanx.DataParallel(model, ["cpu"] * replicas)
    return _train(model, inputs, steps)


def _contestants(workload: str, size: int, steps: int) -> dict[str, Callable[[], Sample]]:
    """Return the ways to train on `size` cores; the slowest rank counts."""
    ways = {
        "one process, 1 thread": (1, 1, 1),
        f"one process, {size} threads in each operation": (1, size, 1),
        f"DataParallel, {size} threads": (1, size, size),
        f"DistributedDataParallel, {size} processes": (size, 1, 1),
    }

    def measure(ranks: int, threads: int, replicas: int) -> Sample:
        return max(run_ranks(_rank, ranks, workload, steps, threads, replicas, init=ranks > 1))

    return {name: lambda way=way: measure(*way) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2, help="threads, and processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="measured in each round")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    results: dict[str, dict[str, list[float]]] = {}
    rows = []
    for workload in WORKLOADS:
        contestants = _contestants(workload, arguments.world_size, arguments.steps)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for order in harness.plan_rounds(list(contestants), arguments.rounds):
            weights = {}
            for name in order:
                took, weights[name] = contestants[name]()
                seconds[name].append(took)
            torch.testing.assert_close(list(weights.values()), [weights[order[0]]] * len(weights), rtol=1e-4, atol=0)
        results[workload] = seconds
        peer = seconds[list(contestants)[-1]]
        rows += [
            [
                workload,
                name,
                harness.format_time(statistics.median(mine)),
                harness.format_ratio(statistics.median(a / b for a, b in zip(mine, peer, strict=True))),
            ]
            for name, mine in seconds.items()
        ]
    harness.print_table(["model", "", "a step", "of DistributedDataParallel's"], rows)
    harness.write_results(arguments.output, results, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
