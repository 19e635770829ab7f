"""How long is a training step between two hosts, and how many bytes leave one, with each communication hook?"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.ddp.hooks import PowerSGDState, QuantizationState, bf16_compress_hook, powerSGD_hook, quantize_hook
from phalanx.testing import Host, hosts, run_ranks, why_no_hosts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from harness.ranks import join_on_host  # noqa: E402

HOOKS: dict[str, Callable[[Any], Any]] = {
    "no hook": lambda group: None,
    "bf16_compress_hook": lambda group: (group, bf16_compress_hook),
    "quantize_hook": lambda group: (QuantizationState(group), quantize_hook),
    "powerSGD_hook, rank 1": lambda group: (PowerSGDState(group, 1, start_powerSGD_iter=2), powerSGD_hook),
    "powerSGD_hook, rank 4": lambda group: (PowerSGDState(group, 4, start_powerSGD_iter=2), powerSGD_hook),
}
BACKENDS = ("gloo", "phalanx")
WARMUP = 3  # the plan is made anew after the first backward, and PowerSGD begins after the second


@dataclass(frozen=True)
class Sample:
    """One step: seconds on the slowest rank, and bytes that left the busier host, headers included."""

    seconds: float
    sent: int


def build(width: int, group: Any, hook: str) -> nn.Module:
    """The perceptron, wrapped, with the hook, after its first steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width // 3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    ddp = phalanx.DistributedDataParallel(model, process_group=group, bucket_cap_mb=4, check=False)
    made = HOOKS[hook](group)
    if made:
        ddp.register_comm_hook(*made)
    return ddp


def step(ddp: nn.Module, inputs: torch.Tensor) -> None:
    ddp.zero_grad()
    ddp(inputs).square().mean().backward()


def rank_main(rank: int, world_size: int, machines: list[Host], width: int, rounds: int) -> dict[str, list[Sample]]:
    """Build every contestant, check that ranks agree and are near the mean, and measure them in turns."""
    join_on_host(rank, world_size, machines, 1, timeout_s=300.0)
    groups = {"phalanx": dist.group.WORLD, "gloo": dist.new_group(list(range(world_size)), backend="gloo")}
    inputs = torch.randn(16, width // 3, generator=torch.Generator().manual_seed(rank))
    contestants = {f"{backend}, {hook}": build(width, groups[backend], hook) for backend in BACKENDS for hook in HOOKS}
    for name, ddp in contestants.items():
        for _ in range(WARMUP):
            step(ddp, inputs)
        check(name, ddp)
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for order in harness.plan_rounds(list(contestants), rounds):
        for name in order:
            before = [machine.bytes_sent() for machine in machines] if rank == 0 else []
            dist.barrier()
            begin = time.perf_counter()
            step(contestants[name], inputs)
            took = torch.tensor([time.perf_counter() - begin])
            dist.barrier()
            sent = max((m.bytes_sent() - b for m, b in zip(machines, before, strict=False)), default=0)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            samples[name].append(Sample(took.item(), sent))
    dist.destroy_process_group()
    return samples


def check(name: str, ddp: nn.Module) -> None:
    """All ranks must hold the same gradients, and finite ones."""
    for parameter in ddp.parameters():
        everybodys = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        assert parameter.grad is not None
        dist.all_gather(everybodys, parameter.grad)
        if not all(torch.equal(one, everybodys[0]) for one in everybodys) or not everybodys[0].isfinite().all():
            raise SystemExit(f"{name}: the ranks' gradients differ, or are not finite")


def table(samples: dict[str, list[Sample]], num_bytes: int) -> list[list[str]]:
    """A row for each contestant; the peer is Gloo without a hook."""
    rows = []
    peer = next(iter(samples.values()))
    for name, mine in samples.items():
        ratio = harness.summarise(a.seconds / b.seconds for a, b in zip(mine, peer, strict=True))
        sent = harness.summarise(sample.sent / num_bytes for sample in mine)
        median = harness.summarise(sample.seconds for sample in mine).median
        rows.append(
            [
                name,
                harness.format_time(median),
                harness.format_ratio(ratio.median),
                harness.format_ratio(ratio.high),
                f"{sent.median:.3f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc says it")
    parser.add_argument("--width", type=int, default=2048, help="of the perceptron's hidden layers")
    parser.add_argument("--rounds", type=int, default=7)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(f"benchmarks/hooks: {reason}")
    machine = harness.describe_machine()
    width = arguments.width
    num_bytes = 4 * (width // 3 * width + width * width + 2 * width + 10 * width + 10)
    with hosts(2, rate=arguments.rate) as machines:
        samples = run_ranks(rank_main, 2, machines, width, arguments.rounds, init=False, timeout=3600)[0]
    place = f"2 hosts x 1 rank, {arguments.rate} between them, {num_bytes / 2**20:.1f} MiB of gradients"
    header = ["a step with", "median", "of Gloo without a hook", "worst round", "bytes out of a host / gradients"]
    harness.print_table(header, table(samples, num_bytes), title=f"{place}, {arguments.rounds} rounds")
    raw = {name: [asdict(sample) for sample in all_] for name, all_ in samples.items()}
    harness.write_results(arguments.output, {"place": place, "samples": raw}, machine=machine)


if __name__ == "__main__":
    main()
