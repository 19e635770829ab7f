"""How soon does an epoch begin, and how fast do its indices come? Ours and PyTorch's sampler, in turns."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DistributedSampler as TorchSampler

from phalanx.data import DistributedSampler

SAMPLERS = {"pytorch": TorchSampler, "phalanx": DistributedSampler}


def seconds_of_an_epoch(make: Any, length: int, world_size: int) -> float:
    sampler = make(range(length), num_replicas=world_size, rank=0)
    begin = time.perf_counter()
    deque(sampler, maxlen=0)
    return time.perf_counter() - begin


def seconds_to_first_index(make: Any, length: int) -> float:
    begin = time.perf_counter()
    next(iter(make(range(length), num_replicas=2, rank=1)))
    return time.perf_counter() - begin


def bytes_to_first_index(make: Any, length: int) -> int:
    tracemalloc.start()  # numpy and Python report their memory to it, torch does not: PyTorch's tensor is not counted
    next(iter(make(range(length), num_replicas=2, rank=1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def in_turns(measure: Any, rounds: int, *arguments: int) -> dict[str, float]:
    """The median of each sampler over rounds in which both are measured one after the other."""
    seen: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for _ in range(rounds):
        for name, make in SAMPLERS.items():
            seen[name].append(measure(make, *arguments))
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()

    results: dict[str, Any] = {
        "hardware": {"processor": platform.machine(), "cores": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        "rounds": arguments.rounds,
        "epoch": [],
    }
    print("indices of one rank in one epoch, ns each (median)")
    print(f"{'length':>12} {'ranks':>6} {'pytorch':>9} {'phalanx':>9} {'ratio':>7}")
    for length, world_size in [(1_000, 1), (50_000, 1), (1_000_000, 1), (1_000_000, 2), (1_000_000, 4)]:
        seconds = in_turns(seconds_of_an_epoch, arguments.rounds, length, world_size)
        ns = {name: value * 1e9 * world_size / length for name, value in seconds.items()}
        ratio = ns["pytorch"] / ns["phalanx"]
        results["epoch"].append({"length": length, "ranks": world_size, "ns_per_index": ns, "times_faster": ratio})
        print(f"{length:>12} {world_size:>6} {ns['pytorch']:>9.1f} {ns['phalanx']:>9.1f} {ratio:>6.2f}x")

    # PyTorch's first index needs the whole order: at 10^9 that is 8 GB of tensor and 40 GB of list. It stops at 10^7.
    first_7 = in_turns(seconds_to_first_index, 3, 10**7)
    first_9 = statistics.median(seconds_to_first_index(DistributedSampler, 10**9) for _ in range(arguments.rounds))
    peak_9 = bytes_to_first_index(DistributedSampler, 10**9)
    results["start"] = {
        "ms_at_1e7": {name: value * 1e3 for name, value in first_7.items()},
        "phalanx_ms_at_1e9": first_9 * 1e3,
        "phalanx_mb_at_1e9": peak_9 / 1e6,
    }
    print(f"\nconstruction to first index over 10^7: pytorch {first_7['pytorch'] * 1e3:.1f} ms,", end=" ")
    print(f"phalanx {first_7['phalanx'] * 1e3:.2f} ms")
    print(f"over 10^9: phalanx {first_9 * 1e3:.2f} ms, {peak_9 / 1e6:.2f} MB")
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
