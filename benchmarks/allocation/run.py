"""What is saved where the tensors of an all_gather are made in the group's memory, as FSDP2 asks for them?"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

CONTESTANTS = ("gloo", "ordinary", "allocated")
MEGABYTES = (1, 4, 16, 64)


def _rank(rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    gloo, group = dist.new_group(backend="gloo"), dist.group.WORLD
    samples: dict[str, list[float]] = {}
    for megabytes in MEGABYTES:
        count = megabytes * 2**20 // 4 // world_size
        outputs = {
            "gloo": torch.empty(count * world_size),
            "ordinary": torch.empty(count * world_size),
            "allocated": group.allocate_tensor(count * world_size, dtype=torch.float32, device=torch.device("cpu")),
        }
        for order in harness.plan_rounds(list(outputs), rounds + 1):
            for name in order:
                whole = outputs[name]
                part = whole.narrow(0, rank * count, count).fill_(rank)
                dist.barrier()
                begin = time.perf_counter()
                dist.all_gather_into_tensor(whole, part, group=gloo if name == "gloo" else group)
                samples.setdefault(f"{name} {megabytes}", []).append(time.perf_counter() - begin)
                assert whole[::count].tolist() == list(range(world_size))
    return {name: values[1:] for name, values in samples.items()}  # the first touches the pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    samples = run_ranks(_rank, arguments.world_size, arguments.rounds, timeout=500.0)[0]
    rows = []
    for megabytes in MEGABYTES:
        seconds = {name: statistics.median(samples[f"{name} {megabytes}"]) for name in CONTESTANTS}
        ratios = [harness.format_ratio(seconds["allocated"] / seconds[peer]) for peer in ("gloo", "ordinary")]
        rows.append([f"{megabytes} MiB", *(harness.format_time(seconds[name]) for name in CONTESTANTS), *ratios])
    header = ["all_gather of", "Gloo", "ordinary tensors", "allocate_tensor", "of Gloo's", "of ordinary's"]
    harness.print_table(header, rows, title=f"{arguments.world_size} ranks")
    results = {"rounds": arguments.rounds, "world_size": arguments.world_size, "samples_s": samples}
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
