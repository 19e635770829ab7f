"""How fast do samples come out of shards, and how soon does a loader go on at half of an epoch?

2 ranks x 2 workers read one epoch: phalanx's streams, webdataset and litData, in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import queue
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import contestants
import harness

NAMES = ("phalanx, tar", "phalanx, tar, read on", "webdataset", "phalanx, litdata", "litdata")


def _rank(
    task: str, name: str, folder: Path, rank: int, arguments: Any, barrier: Any, results: Any, ranks: int, workers: int
) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a rank that was started by a launcher
    place = rank, ranks, arguments.batch, workers
    state_file = folder / f"state-{rank}.pkl"
    loader = contestants.make_loader(name, folder, *place)
    if task == "resume":
        loader.load(pickle.loads(state_file.read_bytes()))
    barrier.wait()
    begun = time.perf_counter()
    first, count, seen = 0.0, 0, []
    batches = arguments.shards * arguments.samples // (ranks * arguments.batch)
    for batch in loader:
        first = first or time.perf_counter() - begun
        count += len(batch)
        seen.append(batch)
        if task == "save" and len(seen) == batches // 2:
            state_file.write_bytes(pickle.dumps(loader.save(len(seen))))
            break
        if task == "resume":
            break
    took = time.perf_counter() - begun
    numbers = torch.cat(seen).tolist() if seen else []
    results.put((rank, first, took, count, numbers if task == "epoch" else []))


def run_ranks(task: str, name: str, folder: Path, arguments: Any, ranks: int, workers: int) -> list[Any]:
    """Return what each rank measured."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=_rank, args=(task, name, folder, rank, arguments, barrier, results, ranks, workers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    measured: list[Any] = []
    while len(measured) < ranks:
        try:
            measured.append(results.get(timeout=1.0))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit(f"{name}: a rank has failed in {task}") from None
    for process in processes:
        process.join()
    return sorted(measured)


def measure_epoch(name: str, folder: Path, arguments: Any) -> dict[str, float]:
    measured = run_ranks("epoch", name, folder, arguments, 2, 2)
    count = sum(one[3] for one in measured)
    distinct = len({number for one in measured for number in one[4]})
    total = arguments.shards * arguments.samples
    return {
        "samples_per_s": count / max(one[2] for one in measured),
        "first_s": max(one[1] for one in measured),
        "lost": total - distinct,
        "twice": count - distinct,
    }


def measure_resume(name: str, folder: Path, arguments: Any) -> float:
    run_ranks("save", name, folder, arguments, 2, 2)
    return max(one[1] for one in run_ranks("resume", name, folder, arguments, 2, 2))


def measure_start(shards: int, rounds: int) -> float:
    """Seconds from the construction of a stream over so many shards, with an index file, to the middle of an epoch."""
    import phalanx

    draw, samples = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index.json"
        lengths = {f"shard-{number}.tar": draw.randint(900, 1100) for number in range(shards)}
        index.write_text(json.dumps({"phalanx_index": 1, "shards": lengths}))
        for _ in range(rounds):
            begun = time.perf_counter()
            stream = phalanx.data.Stream(list(lengths), lambda _: np.arange(2000), index=index)
            sampler = phalanx.DistributedSampler(stream, 2, 0)
            sampler.load_state_dict({**sampler.state_dict(), "consumed": len(stream) // 2})
            next(iter(sampler))
            samples.append(time.perf_counter() - begun)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=48)
    parser.add_argument("--samples", type=int, default=500, help="of each shard")
    parser.add_argument("--bytes", type=int, default=10_000, help="of each sample")
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    folder = Path(tempfile.mkdtemp(prefix="streams-"))
    try:
        contestants.write_data(folder, arguments.shards, arguments.samples, arguments.bytes)
        epochs: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        resumes: dict[str, list[float]] = {name: [] for name in NAMES}
        for order in harness.plan_rounds(NAMES, arguments.rounds):
            for name in order:
                epochs[name].append(measure_epoch(name, folder, arguments))
                resumes[name].append(measure_resume(name, folder, arguments))
    finally:
        shutil.rmtree(folder)
    rows = []
    for name in NAMES:
        of = {key: statistics.median(one[key] for one in epochs[name]) for key in epochs[name][0]}
        rows.append([
            name, f"{of['samples_per_s']:,.0f}", harness.format_time(of["first_s"]),
            harness.format_time(statistics.median(resumes[name])), f"{of['lost']:.0f}", f"{of['twice']:.0f}",
        ])  # fmt: skip
    harness.print_table(["2 ranks x 2 workers", "samples/s", "first batch", "resumed at half", "lost", "twice"], rows)
    start = measure_start(10_000, arguments.rounds)
    print(
        f"\n10,000 shards with an index file: {harness.format_time(start)} to the first index in the middle of an epoch"
    )
    results = {"rounds": arguments.rounds, "epochs": epochs, "resumes_s": resumes, "start_of_10000_shards_s": start}
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
