"""Show what every algorithm costs as a function of the number of ranks, as a table and as plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.collectives.algorithms import offering
from phalanx.collectives.closed_form import predict
from phalanx.collectives.cost import Cost
from phalanx.collectives.network import Links, Topology
from phalanx.collectives.schedule import Operation
from phalanx.collectives.units import format_bytes, format_bytes_per_s, format_seconds
from phalanx.svg import FAINT, INK, RULE, Drawing, colour

# Up to so many numbers of ranks get a row each; of more, the powers of two and both ends.
_ROWS = 12

_WHERE_THEY_MEET = "Of whole buffers. Where curves meet, the first listed is seen."
_MARKS = {"hierarchical": "h", "ring": "o", "halving_doubling": "x", "doubling": "d", "tree": "t", "single": "s"}


@dataclass(frozen=True)
class Curves:
    """`Curves` has `costs[algorithm]`, with one entry for each of `world_sizes`, ascending."""

    operation: Operation
    nbytes: int
    links: Links
    ranks_per_host: int
    world_sizes: tuple[int, ...]
    costs: dict[str, tuple[Cost, ...]]

    @property
    def headline(self) -> str:
        """Return the question in one line."""
        latency, bandwidth = (
            format_seconds(self.links.inter.latency_s),
            format_bytes_per_s(self.links.inter.bytes_per_s),
        )
        ranks = "1 rank" if self.ranks_per_host == 1 else f"{self.ranks_per_host} ranks"
        return (
            f"{self.operation} of {format_bytes(self.nbytes)}, {ranks} per host, "
            f"{latency} and {bandwidth} between hosts"
        )


def compute(operation: Operation, nbytes: int, world_sizes: Sequence[int], ranks_per_host: int, links: Links) -> Curves:
    """Price every algorithm that sends messages; `direct`, which needs one host and sends none, is left out.

    Raises:
        ValueError: an unknown operation, no or a negative number of ranks.
    """
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"numbers of ranks must be at least 1, got {list(world_sizes)}")
    ascending = tuple(sorted(set(world_sizes)))
    topologies = [Topology.filled(world_size, ranks_per_host) for world_size in ascending]
    costs = {
        algorithm.name: tuple(predict(algorithm.name, operation, nbytes, topology, links) for topology in topologies)
        for algorithm in offering(operation)
        if not algorithm.one_host
    }
    return Curves(operation, nbytes, links, ranks_per_host, ascending, costs)


def plain(curves: Curves) -> Iterator[str]:
    """Yield the tables and the plot as lines of text."""
    yield curves.headline
    for title, header, rows in _tables(curves):
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        yield ""
        yield title
        for row in [header, *rows]:
            yield "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
    yield ""
    yield from _plot(curves)


def show(curves: Curves, console: Console) -> None:
    """Print the tables and the plot on a terminal; green is the best of a row."""
    console.print(Text(curves.headline, style="bold"))
    for title, header, rows in _tables(curves):
        table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
        for name in header:
            table.add_column(name, justify="right", no_wrap=True)
        for row, best in zip(rows, _best(curves, title), strict=True):
            cells = (Text(text, style="green" if i in best else "none") for i, text in enumerate(row[1:]))
            table.add_row(row[0], *cells)
        console.print("", table, sep="\n")
    console.print("", *(Text(line, no_wrap=True) for line in _plot(curves)), sep="\n")


def _bytes(cost: Cost) -> float:
    return cost.busiest_bytes


_MEASURES: tuple[tuple[str, Callable[[Cost], float], Callable[[float], str]], ...] = (
    ("Predicted time", lambda cost: cost.seconds, format_seconds),
    ("Bytes at the busiest rank, sent or received, whichever is more", _bytes, format_bytes),
    ("Steps", lambda cost: cost.steps, lambda steps: f"{steps:.0f}"),
)


def _tables(curves: Curves) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    for title, measure, text in _MEASURES:
        rows = [
            [str(curves.world_sizes[i]), *(text(measure(costs[i])) for costs in curves.costs.values())]
            for i in _shown(curves.world_sizes)
        ]
        yield title, ["ranks", *curves.costs], rows


def _best(curves: Curves, title: str) -> list[set[int]]:
    measure = next(measure for name, measure, _ in _MEASURES if name == title)
    best = []
    for i in _shown(curves.world_sizes):
        values = [measure(costs[i]) for costs in curves.costs.values()]
        best.append({column for column, value in enumerate(values) if value <= min(values) * (1 + 1e-9)})
    return best


def _shown(world_sizes: Sequence[int]) -> list[int]:
    last = len(world_sizes) - 1
    if last < _ROWS:
        return list(range(last + 1))
    return [i for i, size in enumerate(world_sizes) if i in (0, last) or size & (size - 1) == 0]


def _plot(curves: Curves, width: int = 64, height: int = 16) -> Iterator[str]:
    """Yield the lines of a plot of time over ranks, both logarithmic, in characters; where curves meet, the first
    listed is seen.
    """
    points = [(name, size, cost.seconds) for name, size, cost in _points(curves) if cost.seconds > 0]
    if len({size for _, size, _ in points}) < 2:
        return
    x = _Axis(min(size for _, size, _ in points), max(size for _, size, _ in points), width - 1)
    y = _Axis(min(seconds for _, _, seconds in points), max(seconds for _, _, seconds in points), height - 1)
    grid = [[" "] * width for _ in range(height)]
    for name, size, seconds in reversed(points):
        grid[height - 1 - round(y.at(seconds))][round(x.at(size))] = _MARKS.get(name, "*")
    yield "Predicted time over ranks, both axes logarithmic"
    labels = {0: format_seconds(y.high), height - 1: format_seconds(y.low)}
    margin = max(map(len, labels.values()))
    for row, cells in enumerate(grid):
        yield f"{labels.get(row, '').rjust(margin)} │{''.join(cells)}".rstrip()
    yield f"{' ' * margin} └{'─' * width}"
    low, high = f"{x.low:.0f}", f"{x.high:.0f} ranks"
    yield f"{' ' * margin}  {low}{high.rjust(width - len(low))}"
    yield " " * margin + "  " + "   ".join(f"{_MARKS.get(name, '*')} {name}" for name in curves.costs)
    yield f"{' ' * margin}  {_WHERE_THEY_MEET}"


def _points(curves: Curves) -> Iterator[tuple[str, int, Cost]]:
    for name, costs in curves.costs.items():
        for size, cost in zip(curves.world_sizes, costs, strict=True):
            yield name, size, cost


@dataclass(frozen=True)
class _Axis:
    """It is a logarithmic axis from `low` to `high`, `length` long."""

    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        if self.high == self.low:
            return self.length / 2
        return self.length * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self, base: float) -> list[float]:
        """Return the powers of `base` on the axis, or its ends if there are not two."""
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        powers = [base**power for power in range(first, last + 1)]
        return powers if len(powers) > 1 else [self.low, self.high]

    def doublings(self) -> list[int]:
        powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
        return [2**power for power in powers][:: max(1, len(powers) // 8)]


def draw(curves: Curves) -> str:
    """Return two panels as SVG: the predicted time, and the bytes at the busiest rank. One point is a ValueError."""
    if len([size for size in curves.world_sizes if size > 1]) < 2:
        raise ValueError("a plot needs at least two numbers of ranks above 1, such as 2..64")
    width, height, panel_width, panel_height = 940.0, 470.0, 350.0, 300.0
    drawing = Drawing(width, height, curves.headline)
    drawing.text(24, 34, curves.headline, size=17, anchor="start", bold=True)
    drawing.text(24, 54, _WHERE_THEY_MEET, anchor="start", fill=FAINT)
    for left, (title, measure, text) in zip((84.0, 530.0), _MEASURES[:2], strict=True):
        _panel(drawing, curves, left, 92.0, panel_width, panel_height, title.partition(",")[0], measure, text)
    x = 84.0
    for i, name in enumerate(curves.costs):
        drawing.line([(x, 448), (x + 26, 448)], stroke=colour(i), width=2.5)
        drawing.text(x + 32, 452, name, anchor="start")
        x += 52 + 8.2 * len(name)
    return str(drawing)


def _panel(
    drawing: Drawing, curves: Curves, left: float, top: float, width: float, height: float,
    title: str, measure: Callable[[Cost], float], text: Callable[[float], str],
) -> None:  # fmt: skip
    values = [measure(cost) for _, size, cost in _points(curves) if size > 1]
    positive = [value for value in values if value > 0] or [1.0]
    sizes = [size for size in curves.world_sizes if size > 1]
    x, y = _Axis(sizes[0], sizes[-1], width), _Axis(min(positive), max(positive) * 1.0001, height)
    bottom = top + height
    drawing.text(left, top - 16, title, size=13, anchor="start", bold=True)
    for value in y.ticks(4 if measure is _bytes else 10):
        drawing.line([(left, bottom - y.at(value)), (left + width, bottom - y.at(value))], stroke=RULE)
        drawing.text(left - 8, bottom - y.at(value) + 4, text(value), size=11, fill=FAINT, anchor="end")
    for size in x.doublings():
        drawing.line([(left + x.at(size), bottom), (left + x.at(size), bottom + 5)], stroke=INK)
        drawing.text(left + x.at(size), bottom + 19, str(size), size=11, fill=FAINT)
    drawing.text(left + width / 2, bottom + 36, "ranks", size=12, fill=FAINT)
    drawing.line([(left, top), (left, bottom), (left + width, bottom)], stroke=INK)
    # The first listed is drawn last, so that it is seen where curves meet.
    for i, costs in reversed(list(enumerate(curves.costs.values()))):
        points = [
            (left + x.at(size), bottom - y.at(measure(cost)))
            for size, cost in zip(curves.world_sizes, costs, strict=True)
            if size > 1 and measure(cost) > 0
        ]
        drawing.line(points, stroke=colour(i), width=2)
        if len(points) <= _ROWS:
            for at_x, at_y in points:
                drawing.circle(at_x, at_y, 3, fill=colour(i))
