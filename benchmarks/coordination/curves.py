"""Draw what `scale.py` has measured as curves over the number of hosts, and go on to 10,000 hosts as the end goes.

    python benchmarks/coordination/curves.py benchmarks/coordination/results/scale-8.json

The dashed lines are extrapolated: powers of the number of hosts through the last two points. Of each number of hosts
the last result counts, so that runs of one size each can be put together.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from phalanx.svg import FAINT, INK, RULE, Drawing, colour

Result = dict[str, float]

# What a panel shows: its title, the value of a result, the target at 1,000 hosts.
PANELS: list[tuple[str, Callable[[Result], float], float]] = [
    ("start: seconds", lambda one: one["joined_s"] + one["met_s"], 30.0),
    ("start: coordinator's CPU, seconds", lambda one: one["joined_cpu_s"] + one["met_cpu_s"], 10.0),
    ("memory at its peak, MB", lambda one: one["peak_mb"], 300.0),
    ("idle: % of a core", lambda one: one["idle_percent"], 10.0),
]
WIDTH, HEIGHT, MARGIN = 250.0, 200.0, 56.0
LEAST_HOSTS, MOST_HOSTS = 100.0, 10_000.0


def draw(results: dict[int, Result]) -> Drawing:
    """One panel for each of `PANELS`, with both axes logarithmic."""
    drawing = Drawing(
        len(PANELS) * (WIDTH + MARGIN) + MARGIN, HEIGHT + 2 * MARGIN, "The coordinator over the number of hosts"
    )
    for number, (title, value, target) in enumerate(PANELS):
        points = [(hosts, value(one)) for hosts, one in sorted(results.items())]
        _draw_panel(drawing, MARGIN + number * (WIDTH + MARGIN), title, points, target, colour(number))
    return drawing


def _draw_panel(
    drawing: Drawing, left: float, title: str, points: list[tuple[int, float]], target: float, stroke: str
) -> None:
    (before, value_before), (last, last_value) = points[-2:]
    exponent = math.log(last_value / value_before) / math.log(last / before)
    extended = [(hosts, last_value * (hosts / last) ** exponent) for hosts in (float(last), MOST_HOSTS)]
    values = [value for _, value in (*points, *extended)] + [target]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))

    def place(hosts: float, value: float) -> tuple[float, float]:
        across = math.log(hosts / LEAST_HOSTS) / math.log(MOST_HOSTS / LEAST_HOSTS)
        return left + across * WIDTH, MARGIN + (1 - math.log(value / low) / math.log(high / low)) * HEIGHT

    drawing.text(left, MARGIN - 14, title, anchor="start", bold=True, fill=INK)
    tick = float(low)
    while tick <= high * 1.001:
        _, y = place(LEAST_HOSTS, tick)
        drawing.line([(left, y), (left + WIDTH, y)], stroke=RULE)
        drawing.text(left - 5, y + 4, f"{tick:g}", size=10, anchor="end", fill=FAINT)
        tick *= 10
    for hosts in (100, 1_000, 10_000):
        drawing.text(place(hosts, low)[0], MARGIN + HEIGHT + 16, f"{hosts:,}", size=10, fill=FAINT)
    x, y = place(1_000, target)
    drawing.circle(x, y, 4, fill="none", stroke=FAINT, told=f"target at 1,000 hosts: {target:g}")
    drawing.text(x - 8, y - 5, f"target {target:g}", size=10, anchor="end", fill=FAINT)
    drawing.line([place(*point) for point in points], stroke=stroke, width=2)
    drawing.line([place(*point) for point in extended], stroke=stroke, dashed=True)
    for hosts, value in points:
        drawing.circle(*place(hosts, value), 3, fill=stroke, told=f"{hosts:,} hosts: {value:.3g}")
    x, y = place(*extended[-1])
    drawing.text(x, y - 8, f"{extended[-1][1]:,.0f}", size=10, anchor="end", fill=stroke)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, default=Path(__file__).with_name("scale.svg"))
    arguments = parser.parse_args()
    results: dict[int, Result] = {}
    for path in arguments.results:
        results |= {int(hosts): one for hosts, one in json.loads(path.read_text())["scale"].items()}
    arguments.figure.write_text(str(draw(results)))


if __name__ == "__main__":
    main()
