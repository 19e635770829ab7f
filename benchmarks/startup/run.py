"""How long from Enter to the end of the first all_reduce? `phalanx run` and torchrun, in turns."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import (  # noqa: E402
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    interleave,
    print_table,
    summarise,
    write_results,
)

SCRIPT = str(HERE / "first_all_reduce.py")
PHALANX = [sys.executable, "-m", "phalanx.cli", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PEER = "torchrun, gloo"
TARGET = 1 / 3

# The agent as it is, noting when it is about to start the zygote: all that lies between Enter and the import of torch.
AGENT = """
import sys, time
from phalanx.launch.agent import agent
start_zygote = agent.ZygoteProcess
def noted(*args, **kwargs):
    print("done at", time.monotonic(), file=sys.stderr, flush=True)
    return start_zygote(*args, **kwargs)
agent.ZygoteProcess = noted
from phalanx.launch.command import main
sys.exit(main(sys.argv[1:]))
"""


def plan_contestants(ranks: int) -> dict[str, Callable[[], float]]:
    count = ["--nproc-per-node", str(ranks)]
    commands = {
        "phalanx run, phalanx": ([*PHALANX, *count, SCRIPT, "phalanx"], ranks),
        "phalanx run, gloo": ([*PHALANX, *count, SCRIPT, "gloo"], ranks),
        PEER: ([*TORCHRUN, *count, SCRIPT, "gloo"], ranks),
        "agent until the zygote starts": ([sys.executable, "-c", AGENT, "--no-python", *count, "true"], 1),
    }
    return {name: lambda command=command, n=n: seconds_to_done(command, n) for name, (command, n) in commands.items()}


def seconds_to_done(command: list[str], times: int) -> float:
    """Seconds from the start of `command` to the last of the `times` moments that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun's default: the same for both
    start = time.monotonic()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    output = finished.stdout + finished.stderr
    found = [float(at) for at in re.findall(r"done at ([0-9.]+)", output)]
    if finished.returncode != 0 or len(found) != times:
        raise SystemExit(f"{' '.join(command)} ended with {finished.returncode}:\n{output}")
    return max(found) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    machine = describe_machine()
    contestants = plan_contestants(arguments.ranks)
    for contestant in contestants.values():
        contestant()  # once unmeasured: the files come into the page cache
    samples = interleave(contestants, arguments.rounds)
    summaries = {name: summarise(values) for name, values in samples.items()}
    peer = summaries[PEER].median
    rows = [
        [
            name,
            format_time(one.median),
            f"{format_time(one.low)} to {format_time(one.high)}",
            format_ratio(one.median / peer),
        ]
        for name, one in summaries.items()
    ]
    title = f"{arguments.ranks} ranks, median of {arguments.rounds} rounds"
    print_table(["command, backend", "first all_reduce done", "range", "of torchrun"], rows, title=title)
    ratio = summaries["phalanx run, phalanx"].median / peer
    print(f"\nTarget, at most {format_ratio(TARGET)} of torchrun: {'reached' if ratio <= TARGET else 'missed'}.")
    results = {"ranks": arguments.ranks, "target": TARGET, "ratio": ratio, "seconds": samples}
    write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
