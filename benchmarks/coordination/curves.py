"""Draw what `scale.py` has measured as curves over the number of hosts, and go on to 10,000 hosts as the end goes.

    python benchmarks/coordination/curves.py benchmarks/coordination/results/scale-8.json

The dashed lines are extrapolated: powers of the number of hosts through the last two points. Of each number of hosts
the last result counts, so that runs of one size each can be put together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.curves import Panel, draw, extend

Result = dict[str, float]

# What a panel shows: its title, the value of a result, the target at 1,000 hosts.
PANELS: list[tuple[str, Callable[[Result], float], float]] = [
    ("start: seconds", lambda one: one["joined_s"] + one["met_s"], 30.0),
    ("start: coordinator's CPU, seconds", lambda one: one["joined_cpu_s"] + one["met_cpu_s"], 10.0),
    ("memory at its peak, MB", lambda one: one["peak_mb"], 300.0),
    ("idle: % of a core", lambda one: one["idle_percent"], 10.0),
]
MOST_HOSTS = 10_000.0


def panels(results: dict[int, Result]) -> list[Panel]:
    """One panel for each of `PANELS`, with what is extrapolated."""
    made = []
    for title, value, target in PANELS:
        points = [(float(hosts), value(one)) for hosts, one in sorted(results.items())]
        made.append(Panel(title, {"": points}, {"": extend(points, MOST_HOSTS)}, (1_000.0, target)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, default=Path(__file__).with_name("scale.svg"))
    arguments = parser.parse_args()
    results: dict[int, Result] = {}
    for path in arguments.results:
        results |= {int(hosts): one for hosts, one in json.loads(path.read_text())["scale"].items()}
    arguments.figure.write_text(str(draw("The coordinator over the number of hosts", panels(results))))


if __name__ == "__main__":
    main()
