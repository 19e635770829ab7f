"""What does the flight recorder cost? The smallest all_reduce with it and without it, side by side.

python benchmarks/recorder/run.py --record recorder
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "csrc"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-pthread", f"-I{CORE}"]  # setup.py's
WRAPPED = ["-Wl,--wrap=plx_record_enter", "-Wl,--wrap=plx_record_leave"]

THROUGH_TORCH = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("phalanx")
tensor = torch.ones(1)
def call(n):
    begin = time.perf_counter_ns()
    for _ in range(n):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return (time.perf_counter_ns() - begin) / n
call(500)
times = [call({calls}) for _ in range({rounds})]
if rank == 0:
    print("times", *times, flush=True)
dist.destroy_process_group()
"""


def build(folder: Path) -> dict[str, Path]:
    """Both programs; the core's objects are the same."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    sources = [str(path) for path in sorted(CORE.glob("*.c")) if not path.name.startswith("py_")]
    programs = {}
    for name, options in (("with", []), ("without", WRAPPED)):
        programs[name] = folder / name
        subprocess.run(
            [*compiler, *FLAGS, *options, str(HERE / "cost.c"), *sources, "-o", str(programs[name])], check=True
        )
    return programs


def measure(program: Path, rounds: int, calls: int) -> tuple[list[float], list[float]]:
    """Nanoseconds per all_reduce, and per entering and leaving alone, of each round."""
    cores = sorted(os.sched_getaffinity(0))
    words = [str(program), str(cores[0]), str(cores[-1]), str(rounds), str(calls)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    at = said.index("alone")
    return [float(word) for word in said[:at]], [float(word) for word in said[at + 1 :]]


def measure_torch(folder: Path, rounds: int, calls: int) -> list[float]:
    """Nanoseconds per call through torch.distributed, recorder included, of each round."""
    script = folder / "through_torch.py"
    script.write_text(THROUGH_TORCH.replace("{rounds}", str(rounds)).replace("{calls}", str(calls)))
    command = [sys.executable, "-m", "phalanx.cli", "run", "--nproc-per-node", "2", str(script)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(word) for word in said.partition("times ")[2].split()]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="how often the two programs take turns")
    parser.add_argument("--rounds", type=int, default=100, help="rounds per turn")
    parser.add_argument("--calls", type=int, default=300, help="calls per round")
    harness.add_output_arguments(parser, HERE)
    options = parser.parse_args()
    machine = harness.describe_machine()
    calls: dict[str, list[float]] = {"with": [], "without": []}
    alone: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as name:
        programs = build(Path(name))
        for _ in range(options.turns):
            for contestant, program in programs.items():
                times, idle = measure(program, options.rounds, options.calls)
                calls[contestant] += times
                alone[contestant] += idle
        through_torch = measure_torch(Path(name), options.rounds, options.calls)
    enter_and_leave = statistics.median(alone["with"]) - statistics.median(alone["without"])
    results = {
        "core_with_ns": statistics.median(calls["with"]),
        "core_without_ns": statistics.median(calls["without"]),
        "core_with_fastest_ns": min(calls["with"]),
        "core_without_fastest_ns": min(calls["without"]),
        "enter_and_leave_ns": enter_and_leave,
        "through_torch_ns": statistics.median(through_torch),
        "through_torch_fastest_ns": min(through_torch),
        # of the fastest rounds: on a busy machine medians are the other processes' time, and would flatter us
        "share_of_core_call": 1 - min(calls["without"]) / min(calls["with"]),
        "share_of_torch_call": (min(calls["with"]) - min(calls["without"])) / min(through_torch),
    }
    print(json.dumps({key: round(value, 4) for key, value in results.items()}, indent=1))
    harness.write_results(options.output, results, machine=machine)


if __name__ == "__main__":
    main()
