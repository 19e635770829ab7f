"""Draw curves over a number (of hosts, of ranks) on two logarithmic axes, as an SVG that a README shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx._base.svg import FAINT, INK, RULE, Drawing, colour

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 250.0, 200.0, 56.0


@dataclass(frozen=True)
class Panel:
    """A panel is one picture: its curves by name, those that were not measured dashed, and a point to stay below."""

    title: str
    curves: Mapping[str, Sequence[Point]]
    dashed: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    target: Point | None = None


def extend(points: Sequence[Point], to: float) -> list[Point]:
    """Go on from the last of `points` to `to`, as a power through the last two: what a straight line here means."""
    (before, value_before), (last, last_value) = points[-2:]
    exponent = math.log(last_value / value_before) / math.log(last / before)
    return [(last, last_value), (to, last_value * (to / last) ** exponent)]


def draw(title: str, panels: Sequence[Panel], columns: int = 4) -> Drawing:
    """Draw `panels` in rows of `columns`; a curve has the same colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in (*panel.curves, *panel.dashed)))
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    head = 26.0 if len(names) > 1 else 0.0
    drawing = Drawing(columns * (WIDTH + MARGIN) + MARGIN, rows * (HEIGHT + 1.5 * MARGIN) + head + 0.5 * MARGIN, title)
    if head:
        across = MARGIN
        for number, name in enumerate(names):
            drawing.line([(across, head - 4), (across + 20, head - 4)], stroke=colour(number), width=3)
            drawing.text(across + 26, head, name, anchor="start", size=12, fill=INK)
            across += 50 + 7 * len(name)
    for number, panel in enumerate(panels):
        left = MARGIN + number % columns * (WIDTH + MARGIN)
        top = head + MARGIN + number // columns * (HEIGHT + 1.5 * MARGIN)
        colours = {name: colour(names.index(name) if head else number) for name in names}
        _draw_panel(drawing, left, top, panel, colours)
    return drawing


def _draw_panel(drawing: Drawing, left: float, top: float, panel: Panel, colours: Mapping[str, str]) -> None:
    points = [point for curve in (*panel.curves.values(), *panel.dashed.values()) for point in curve]
    values = [value for _, value in (*points, *([panel.target] if panel.target else []))]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    high = high if high > low else 10 * low

    def place(at: float, value: float) -> tuple[float, float]:
        across = math.log(at / first) / math.log(last / first)
        return left + across * WIDTH, top + (1 - math.log(value / low) / math.log(high / low)) * HEIGHT

    drawing.text(left, top - 14, panel.title, anchor="start", bold=True, fill=INK)
    tick = float(low)
    while tick <= high * 1.001:
        _, y = place(first, tick)
        drawing.line([(left, y), (left + WIDTH, y)], stroke=RULE)
        drawing.text(left - 5, y + 4, f"{tick:g}", size=10, anchor="end", fill=FAINT)
        tick *= 10
    for at in _ticks(sorted({at for at, _ in points})):
        drawing.text(place(at, low)[0], top + HEIGHT + 16, f"{at:,.0f}", size=10, fill=FAINT)
    if panel.target:
        x, y = place(*panel.target)
        drawing.circle(
            x, y, 4, fill="none", stroke=FAINT, tooltip=f"target at {panel.target[0]:,.0f}: {panel.target[1]:g}"
        )
        drawing.text(x - 8, y - 5, f"target {panel.target[1]:g}", size=10, anchor="end", fill=FAINT)
    for name, curve in panel.curves.items():
        drawing.line([place(*point) for point in curve], stroke=colours[name], width=2)
        for at, value in curve:
            drawing.circle(*place(at, value), 3, fill=colours[name], tooltip=f"{name}, {at:,.0f}: {value:.3g}")
    for name, curve in panel.dashed.items():
        drawing.line([place(*point) for point in curve], stroke=colours[name], dashed=True)
        x, y = place(*curve[-1])
        value = curve[-1][1]
        drawing.text(
            x, y - 8, f"{value:,.0f}" if value >= 100 else f"{value:.3g}", size=10, anchor="end", fill=colours[name]
        )


def _ticks(places: Sequence[float]) -> list[float]:
    """Return those of `places` that are at least twice the one before: the others' numbers would lie on theirs."""
    kept: list[float] = []
    for at in places:
        if not kept or at >= 2 * kept[-1]:
            kept.append(at)
    return kept
