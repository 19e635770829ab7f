"""How long is a step with a sparse embedding? Ours and PyTorch's DDP over one backend, and PyTorch's on Gloo."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

CONTESTANTS = ("pytorch-phalanx", "phalanx", "pytorch-gloo")
ROWS, WIDTH, BATCH = 10_000, 64, 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def _train(model: nn.Module, batches: torch.Tensor) -> float:
    """Seconds per step; all ranks begin and end together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    begin = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return (time.perf_counter() - begin) / len(batches)


def _rank(rank: int, world_size: int, steps: int, rounds: int) -> dict[str, list[float]]:
    models: dict[str, nn.Module] = {
        "pytorch-phalanx": nn.parallel.DistributedDataParallel(_model()),
        "phalanx": phalanx.DistributedDataParallel(_model(), check=False),
        "pytorch-gloo": nn.parallel.DistributedDataParallel(_model(), process_group=dist.new_group(backend="gloo")),
    }
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randint(ROWS, (steps, BATCH), generator=generator)
    weights = []
    for model in models.values():  # warm, and the same for all
        _train(model, batches)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])
    samples: dict[str, list[float]] = {name: [] for name in models}
    for order in harness.plan_rounds(list(models), rounds):
        for name in order:
            samples[name].append(_train(models[name], batches))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=30, help="per round")
    parser.add_argument("--rounds", type=int, default=15)
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    results = []
    for world_size in arguments.world_size:
        samples = run_ranks(_rank, world_size, arguments.steps, arguments.rounds, timeout=500.0)[0]
        seconds = {name: statistics.median(samples[name]) for name in CONTESTANTS}
        peer = seconds["pytorch-phalanx"]
        rows = [
            [name, harness.format_time(seconds[name]), harness.format_ratio(seconds[name] / peer)]
            for name in CONTESTANTS
        ]
        harness.print_table(["DDP and backend", "step", "of PyTorch's over phalanx"], rows, title=f"{world_size} ranks")
        results.append({"world_size": world_size, "samples_s": samples})
    harness.write_results(arguments.output, {"rounds": arguments.rounds, "world_sizes": results}, machine=machine)


if __name__ == "__main__":
    main()
