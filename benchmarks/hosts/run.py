"""How long is an all_reduce between hosts whose link is the bottleneck? Gloo over all ranks, and the hierarchy."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import Host, hosts, run_ranks, why_no_hosts

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

PEER = "gloo"
CONTESTANTS = (PEER, "phalanx", "phalanx-bfloat16")
TARGETS = {"phalanx": 0.6, "phalanx-bfloat16": 0.35}
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """One all_reduce: seconds on the slowest rank, and bytes that left the busiest host, headers included."""

    seconds: float
    sent: int


def rank_main(
    rank: int, world_size: int, machines: list[Host], per_host: int, sizes: Sequence[int], rounds: int
) -> dict[str, dict[int, list[Sample]]]:
    """Build a group per contestant, check its values, and measure all of them in turns."""
    machines[rank // per_host].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # the peer's own groups would bind what the machine's name resolves to
    dist.init_process_group(
        "phalanx",
        init_method=f"tcp://{machines[0].address}:29511",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    everybody = list(range(world_size))
    groups = {
        PEER: dist.new_group(everybody, backend="gloo"),
        "phalanx": dist.group.WORLD,
        "phalanx-bfloat16": dist.new_group(
            everybody, backend="phalanx", pg_options=phalanx.Options(wire_dtype=torch.bfloat16)
        ),
    }
    samples: dict[str, dict[int, list[Sample]]] = {name: {size: [] for size in sizes} for name in groups}
    for size in sizes:
        tensor = torch.empty(size // 4)
        for name, group in groups.items():
            tensor.fill_(rank + 1.0)
            dist.all_reduce(tensor, group=group)
            expected = world_size * (world_size + 1) / 2
            if not bool((tensor == expected).all()):
                raise SystemExit(f"{name}: all_reduce of {size} bytes gave {tensor[:4].tolist()}, not {expected}")
        for order in plan_rounds(list(groups), rounds):
            for name in order:
                samples[name][size].append(measure(tensor, groups[name], machines, rank))
    dist.destroy_process_group()
    return samples


def measure(tensor: torch.Tensor, group: dist.ProcessGroup | None, machines: list[Host], rank: int) -> Sample:
    """One all_reduce, back to back with nothing; all ranks begin together."""
    tensor.fill_(1.0)
    before = [machine.bytes_sent() for machine in machines] if rank == 0 else []
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    took = torch.tensor([time.perf_counter() - begin])
    dist.barrier()
    sent = max((m.bytes_sent() - b for m, b in zip(machines, before, strict=False)), default=0)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return Sample(took.item(), sent)


def table(samples: dict[str, dict[int, list[Sample]]]) -> list[list[str]]:
    """A row for each size and contestant."""
    rows = []
    for size in next(iter(samples.values())):
        for name, by_size in samples.items():
            mine = [sample.seconds for sample in by_size[size]]
            peer = [sample.seconds for sample in samples[PEER][size]]
            ratio = summarise(a / b for a, b in zip(mine, peer, strict=True))
            sent = summarise(sample.sent / size for sample in by_size[size])
            rows.append(
                [
                    f"{size // MIB} MiB, {name}",
                    format_time(summarise(mine).median),
                    format_ratio(ratio.median),
                    format_ratio(ratio.high),
                    f"at most {TARGETS[name]}x" if name in TARGETS else "",
                    f"{sent.median:.2f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc says it")
    parser.add_argument("--sizes", default="1,16,64", help="MiB, comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(f"benchmarks/hosts: {reason}")

    machine = describe_machine()
    sizes = [int(size) * MIB for size in arguments.sizes.split(",")]
    world_size = arguments.hosts * arguments.ranks_per_host
    with hosts(arguments.hosts, rate=arguments.rate) as machines:
        job = (machines, arguments.ranks_per_host, sizes, arguments.rounds)
        samples = run_ranks(rank_main, world_size, *job, init=False, timeout=3600)[0]
    place = f"{arguments.hosts} hosts x {arguments.ranks_per_host} ranks, {arguments.rate} between them"
    header = ["all_reduce of float32", "median", "of Gloo's", "worst round", "target", "bytes out of a host / tensor"]
    print_table(header, table(samples), title=f"{place}, {arguments.rounds} rounds")
    raw = {name: {size: [asdict(s) for s in all_] for size, all_ in by.items()} for name, by in samples.items()}
    write_results(arguments.output, {"place": place, "samples": raw}, machine=machine)


if __name__ == "__main__":
    main()
