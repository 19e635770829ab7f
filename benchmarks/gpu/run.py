"""On one GPU: a DDP step against PyTorch's over NCCL, ranks that share it against Gloo, and an offloaded optimizer."""

from __future__ import annotations

import argparse
import os
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
from offload import compare, outgrow  # noqa: E402
from ranks import ALONE, measure  # noqa: E402

from phalanx.testing import run_ranks  # noqa: E402

# Bytes for each parameter that a device has in the second half of the part offload: the plain way takes 16 and more,
# and what is left on the device beside an offloaded optimizer 4.
LIMIT_BYTES = 9

# Of the peer's time in the same run, at most.
TARGETS = {
    ("1 rank", "step"): 1.02,
    ("offload", "step"): 1.3,
}
PARTS = ("1 rank", "2 ranks", "4 ranks", "offload")


def target_of(job: str, what: str) -> float | None:
    """What the ratio to the peer is to be, where something was promised."""
    return next((most for (where, name), most in TARGETS.items() if where == job and what.startswith(name)), None)


def rows(job: str, seconds: dict[str, dict[str, list[float]]], peer: str) -> list[list[str]]:
    """A row for each contestant and quantity: medians, and the ratio to the peer over the rounds."""
    table = []
    for what, times in seconds.items():
        for name in times:
            if name == peer:
                continue
            ratios = [mine / theirs for mine, theirs in zip(times[name], times[peer], strict=True)]
            ratio, most = statistics.median(ratios), None if name == ALONE else target_of(job, what)
            verdict = "" if most is None else f"{'reached' if ratio <= most else 'missed'} ({format_ratio(most)})"
            cells = [format_time(summarise(times[one]).median) for one in (name, peer)]
            table.append([job, what, name, *cells, peer, format_ratio(ratio), format_ratio(max(ratios)), verdict])
    return table


def show(table: list[list[str]]) -> None:
    print_table(["", "", "contestant", "time", "peer", "which", "of the peer", "worst round", "target"], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only shows that this runs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--batch", type=int, default=16, help="times the batch of benchmarks/ddp")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--width", type=int, default=1024, help="of the language model of the part offload")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=16, help="of 1,024 tokens each, in a micro-batch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu: PyTorch sees no CUDA device here. --device cpu shows that the script runs.")

    machine = describe_machine()
    machine["torch"] = torch.__version__
    results: dict[str, object] = {}
    start = "spawn" if arguments.device == "cuda" else "fork"
    for part in arguments.parts:
        if part == "offload":
            continue
        world_size = int(part.split()[0])
        peer = "nccl" if arguments.device == "cuda" and world_size == 1 else "gloo"
        words = (arguments.device, peer, arguments.rounds, arguments.steps, arguments.batch)
        told = run_ranks(measure, world_size, *words, start=start, timeout=540)[0]
        results[part], machine["device"] = told["seconds"], told["device"]
        show(rows(part, told["seconds"], f"pytorch-{peer}"))
    if "offload" in arguments.parts:
        words = (arguments.device, arguments.width, arguments.blocks, arguments.sequences)
        told = run_ranks(compare, 1, *words, arguments.rounds, arguments.threads, start=start, timeout=540)[0]
        print(f"language model of {told['parameters'] / 1e6:.0f} million parameters")
        show(rows("offload", told["seconds"], "plain"))
        limit = int(told["parameters"] * LIMIT_BYTES)
        words = (arguments.device, arguments.width, arguments.blocks, limit, 3, arguments.threads)
        outgrown = run_ranks(outgrow, 1, *words, start=start, timeout=540)[0]
        print(f"with {limit / 1e9:.1f} GB on the device: {outgrown}")
        results["offload"] = {**told, "limit": limit, "with_limit": outgrown}
    write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
