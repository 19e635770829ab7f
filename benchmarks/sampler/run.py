"""How soon does an epoch begin, and how fast do its indices come? Ours and PyTorch's sampler, in turns."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DistributedSampler as TorchSampler

from phalanx.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

SAMPLERS: dict[str, Any] = {"pytorch": TorchSampler, "phalanx": DistributedSampler}
EPOCHS = [(1_000, 1), (50_000, 1), (1_000_000, 1), (1_000_000, 2), (1_000_000, 4)]


def epoch_s(make: Any, length: int, world_size: int) -> float:
    """Seconds per index of one rank's whole share, construction left out."""
    sampler = make(range(length), num_replicas=world_size, rank=0)
    begin = time.perf_counter()
    deque(sampler, maxlen=0)
    return (time.perf_counter() - begin) / len(sampler)


def start_s(make: Any, length: int) -> float:
    """Seconds from the sampler's construction to its first index."""
    begin = time.perf_counter()
    next(iter(make(range(length), num_replicas=2, rank=1)))
    return time.perf_counter() - begin


def start_bytes(length: int) -> int:
    """The most memory that our sampler holds until its first index; numpy and Python report theirs to tracemalloc."""
    tracemalloc.start()
    next(iter(DistributedSampler(range(length), num_replicas=2, rank=1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def medians(measure: Callable[..., float], rounds: int, *arguments: int) -> dict[str, float]:
    samples = harness.interleave({name: partial(measure, make, *arguments) for name, make in SAMPLERS.items()}, rounds)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    machine = harness.describe_machine()

    rows, epochs = [], []
    for length, world_size in EPOCHS:
        seconds = medians(epoch_s, arguments.rounds, length, world_size)
        ratio = seconds["pytorch"] / seconds["phalanx"]
        epochs.append({"length": length, "ranks": world_size, "seconds_per_index": seconds, "ratio": ratio})
        rows.append(
            [
                f"{length:,} samples, {world_size} ranks",
                *(f"{seconds[name] * 1e9:.0f} ns" for name in SAMPLERS),
                harness.format_ratio(ratio),
            ]
        )
    harness.print_table(["one epoch, time per index", *SAMPLERS, "ratio"], rows)

    # Not 10^9 for PyTorch: its first index needs the whole order, a tensor of 8 GB and a list of 40.
    at_1e7 = medians(start_s, 3, 10**7)
    at_1e9 = statistics.median(start_s(DistributedSampler, 10**9) for _ in range(arguments.rounds))
    memory = start_bytes(10**9)
    rows = [
        ["10,000,000 samples", *(harness.format_time(at_1e7[name]) for name in SAMPLERS), ""],
        ["1,000,000,000 samples", "-", harness.format_time(at_1e9), f"{memory / 1e6:.2f} MB"],
    ]
    harness.print_table(["to the first index", *SAMPLERS, "memory"], rows)

    start = {"seconds_at_1e7": at_1e7, "phalanx_seconds_at_1e9": at_1e9, "phalanx_bytes_at_1e9": memory}
    results = {"rounds": arguments.rounds, "epoch": epochs, "start": start}
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
