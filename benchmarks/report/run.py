"""What does `--report` cost a training step? Blocks of steps with it, without it, and without it again, in one job.

python benchmarks/report/run.py --record two-ranks
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import add_output_arguments, describe_machine, write_results

ARMS = WITHOUT, AGAIN, WITH = ("without", "without again", "with")  # a report; the second tells what a ratio is worth
HERE = Path(__file__).resolve().parent
SIZES = {"small": (64, 256, 32), "middle": (256, 1024, 64), "large": (512, 4096, 128)}  # features, hidden, batch


def train(path: str, options: argparse.Namespace) -> None:
    """A rank: blocks of steps, with all that listens taken out in two of three. Rank 0 writes their times."""
    import random
    import time

    import torch
    from torch import nn
    from torch.optim import optimizer as hooks
    from torch.utils.data import DataLoader, TensorDataset, dataloader

    import phalanx
    from phalanx._job.report.recording import current

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
        times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        draw = random.Random(1)  # the same order on every rank
        for block in range(options.blocks + 2):
            for arm in draw.sample(ARMS, len(ARMS)):
                listen(arm == WITH)
                torch.distributed.barrier()
                steps = 0
                begun, ran = time.perf_counter(), time.thread_time()
                while steps < options.steps:
                    for inputs, targets in loader:
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        steps += 1
                if block > 1:
                    times[arm].append(((time.perf_counter() - begun) / steps, (time.thread_time() - ran) / steps))
        results[name] = times
    listen(True)
    if job.rank == 0:
        Path(path).write_text(json.dumps({"blocks": results, "events_s": time_events(), "steps": current().num_steps}))


def time_events() -> float:
    """Seconds for all events of one step, and for making a record of them, with nothing in between."""
    import time

    from phalanx._comm.diagnostics import step_machine as events
    from phalanx._comm.diagnostics.step_recorder import StepRecorder

    with tempfile.TemporaryDirectory() as folder:
        recorder = StepRecorder(os.path.join(folder, "alone.steps"), {})
        mark = recorder.log.mark
        best = float("inf")
        for _ in range(20):
            begun = time.thread_time()
            for _ in range(500):
                mark(events.BEGIN_DATA)
                mark(events.END_DATA, 32.0)
                mark(events.BEGIN_BACKWARD)
                mark(events.END_BACKWARD_WITH_LOSS, 1.0)
                recorder.log.begin_update(recorder, (), {})
                recorder.log.end_update(recorder, (), {})
            best = min(best, (time.thread_time() - begun) / 500)
        recorder.close(ended=True)
    return best


def compare(ours: list[float], base: list[float]) -> dict[str, float]:
    """The median of the blocks' ratios and differences, and where 95 of 100 such medians of ratios lie."""
    ratios = sorted(a / b for a, b in zip(ours, base, strict=True))
    half = 0.98 * math.sqrt(len(ratios))
    first, last = int(len(ratios) / 2 - half), math.ceil(len(ratios) / 2 + half)
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[max(0, first)],
        "high": ratios[min(len(ratios) - 1, last)],
        "difference_us": 1e6 * statistics.median(a - b for a, b in zip(ours, base, strict=True)),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
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
    table: dict[str, dict[str, dict[str, float] | float]] = {}
    for name, arms in measured["blocks"].items():
        table[name] = {"step_ms": 1e3 * statistics.median(wall for wall, _ in arms[WITHOUT])}
        for arm in (AGAIN, WITH):
            for place, clock in enumerate(("time", "processor time")):
                ours, base = ([times[place] for times in arms[which]] for which in (arm, WITHOUT))
                table[name][f"{arm}, {clock}"] = found = compare(ours, base)
                print(
                    f"{name:7} {table[name]['step_ms']:7.2f} ms  {arm + ', ' + clock:30} "
                    f"{found['ratio']:.4f}  [{found['low']:.4f}, {found['high']:.4f}]  {found['difference_us']:+.0f} µs"
                )
    print(f"the events of a step alone, with a record made of them: {1e6 * measured['events_s']:.1f} µs")
    write_results(options.output, {"models": table, **measured}, machine=machine)


if __name__ == "__main__":
    main()
