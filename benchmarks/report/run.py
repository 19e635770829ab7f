"""What does `--report` cost a training step? Blocks of steps with and without it in one job, in turns.

python benchmarks/report/run.py --record two-ranks
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import add_output_arguments, describe_machine, write_results

HERE = Path(__file__).resolve().parent
SIZES = {"small": (64, 256, 32), "middle": (256, 1024, 64), "large": (512, 4096, 128)}  # features, hidden, batch


def train(path: str, options: argparse.Namespace) -> None:
    """A rank: blocks of steps, with all that listens taken out in every second one. Rank 0 writes their times."""
    import time

    import torch
    from torch import nn
    from torch.optim import optimizer as hooks
    from torch.utils.data import DataLoader, TensorDataset, dataloader

    import phalanx
    from phalanx.report.recording import current

    iterators = dataloader._BaseDataLoaderIter
    job = phalanx.init()
    listening = (iterators.__next__, torch.autograd.backward)
    plain = (iterators.__next__.__wrapped__, torch.autograd.backward.__wrapped__)
    tables = (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)
    kept = [dict(table) for table in tables]

    def listen(on: bool) -> None:
        iterators.__next__, torch.autograd.backward = listening if on else plain
        for table, hooked in zip(tables, kept, strict=True):
            table.clear()
            table.update(hooked if on else {})

    results = {}
    for name in options.models:
        features, hidden, batch = SIZES[name]
        layers = (nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        model = phalanx.DistributedDataParallel(nn.Sequential(*layers), check=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        data = TensorDataset(torch.randn(batch * 8, features), torch.randint(10, (batch * 8,)))
        loader = DataLoader(data, batch)
        times: dict[bool, list[float]] = {True: [], False: []}
        for block in range(2 * options.blocks + 2):
            on = block % 2 == block // 2 % 2  # on, off, off, on: the order turns
            listen(on)
            torch.distributed.barrier()
            steps = 0
            begun = time.perf_counter()
            while steps < options.steps:
                for inputs, targets in loader:
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    steps += 1
            if block > 1:
                times[on].append((time.perf_counter() - begun) / steps)
        results[name] = {"with_s": times[True], "without_s": times[False]}
    listen(True)
    if job.rank == 0:
        Path(path).write_text(json.dumps({"blocks": results, "events_s": time_events(), "steps": current().num_steps}))


def time_events() -> float:
    """Seconds for all events of one step, with nothing in between."""
    import time

    from phalanx.diagnostics.step_recorder import StepRecorder

    with tempfile.TemporaryDirectory() as folder:
        recorder = StepRecorder(os.path.join(folder, "alone.steps"), {})
        best = float("inf")
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(500):
                recorder.begin_data()
                recorder.end_data(32.0)
                recorder.begin_backward()
                recorder.end_backward(1.0)
                recorder.begin_update()
                recorder.end_update()
            best = min(best, (time.perf_counter() - begun) / 500)
    return best


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--blocks", type=int, default=40, help="with and without, each")
    parser.add_argument("--rounds", type=int, dest="blocks", help="the same")
    parser.add_argument("--steps", type=int, default=16, help="in a block")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    add_output_arguments(parser, HERE)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options)
        return
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        words = ["--nproc-per-node", str(options.ranks), "--report", folder, str(HERE / "run.py"), "--rank", str(path)]
        numbers = ["--blocks", str(options.blocks), "--steps", str(options.steps), "--models", *options.models]
        subprocess.run([sys.executable, "-m", "phalanx.cli", "run", *words, *numbers], check=True)
        measured = json.loads(path.read_text())
    table = {}
    for name, times in measured["blocks"].items():
        pairs = [a / b for a, b in zip(times["with_s"], times["without_s"], strict=True)]
        table[name] = {
            "with_ms": 1e3 * statistics.median(times["with_s"]),
            "without_ms": 1e3 * statistics.median(times["without_s"]),
            "ratio_of_medians": statistics.median(times["with_s"]) / statistics.median(times["without_s"]),
            "median_of_ratios": statistics.median(pairs),
            "ratio_of_fastest": min(times["with_s"]) / min(times["without_s"]),
            "events_share": measured["events_s"] / min(times["without_s"]),
        }
        print(name, json.dumps({key: round(value, 4) for key, value in table[name].items()}))
    print(f"the events of a step alone: {1e6 * measured['events_s']:.1f} µs")
    write_results(options.output, {"models": table, **measured}, machine=machine)


if __name__ == "__main__":
    main()
