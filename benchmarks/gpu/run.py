"""On one GPU: how long is a DDP step against PyTorch's over NCCL, and what do two ranks that share it gain on Gloo?"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from harness import (  # noqa: E402 - the line above says where it is
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    print_table,
    summarise,
    write_results,
)
from ranks import measure  # noqa: E402

from phalanx.testing import run_ranks  # noqa: E402

# Of the peer's time in the same run, at most.
TARGETS = {
    ("1 rank", "step"): 1.02,
    ("2 ranks", "all_reduce 65536 KiB"): 1 / 5,
    ("2 ranks", "step"): 1 / 2,
}


def target_of(job: str, what: str) -> float | None:
    """What the ratio to the peer is to be, where something was promised."""
    return next((most for (where, name), most in TARGETS.items() if where == job and what.startswith(name)), None)


def rows(job: str, seconds: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """A row for each quantity: medians, and the ratio to the peer over the rounds."""
    table = []
    for what, times in seconds.items():
        peer = next(name for name in times if name != "phalanx")
        ratios = [mine / theirs for mine, theirs in zip(times["phalanx"], times[peer], strict=True)]
        ratio, most = statistics.median(ratios), target_of(job, what)
        verdict = "" if most is None else f"{'reached' if ratio <= most else 'missed'} ({format_ratio(most)})"
        cells = [format_time(summarise(times[name]).median) for name in ("phalanx", peer)]
        table.append([job, what, *cells, peer, format_ratio(ratio), format_ratio(max(ratios)), verdict])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only shows that this runs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--batch", type=int, default=16, help="times the batch of benchmarks/ddp")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu: PyTorch sees no CUDA device here. --device cpu shows that the script runs.")

    machine = describe_machine()
    seconds, table = {}, []
    start = "spawn" if arguments.device == "cuda" else "fork"
    for job, world_size, peer in (
        ("1 rank", 1, "nccl" if arguments.device == "cuda" else "gloo"),
        ("2 ranks", 2, "gloo"),
    ):
        words = (arguments.device, peer, arguments.rounds, arguments.steps, arguments.batch)
        told = run_ranks(measure, world_size, *words, start=start, timeout=540)[0]
        seconds[job], machine["device"] = told["seconds"], told["device"]
        table += rows(job, seconds[job])
    print_table(["", "", "phalanx", "peer", "which", "of the peer", "worst round", "target"], table)
    write_results(arguments.output, {"seconds": seconds}, machine=machine)


if __name__ == "__main__":
    main()
