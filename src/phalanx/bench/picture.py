"""Draw the comparisons as one picture: a bar for each contestant, a colour for each part of a step."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.comparison import Comparison
from phalanx.bench.sample import PARTS
from phalanx.collectives.units import format_seconds
from phalanx.svg import FAINT, INK, RULE, Drawing, colour

_LEFT, _WIDTH, _RIGHT = 300.0, 520.0, 100.0
_BAR, _ROW, _HEAD = 20.0, 32.0, 56.0
_REST = "#c3cad2"  # it stands for what lies between the parts


def draw(comparisons: Sequence[Comparison]) -> str:
    """Return the medians of `comparisons` as SVG; each has an axis of its own."""
    height = 60 + sum(_HEAD + _ROW * len(comparison.samples) + 20 for comparison in comparisons) + 64
    world_size = comparisons[0].world_size
    title = f"One step of training with {world_size} threads or processes"
    drawing = Drawing(_LEFT + _WIDTH + _RIGHT, height, title)
    drawing.text(24, 34, title, size=17, anchor="start", bold=True)
    top = 60.0
    for comparison in comparisons:
        top = _bars(drawing, comparison, top) + 20
    _legend(drawing, top + 14)
    return str(drawing)


def _bars(drawing: Drawing, comparison: Comparison, top: float) -> float:
    """Draw one comparison's bars from `top` on; return where they end."""
    medians = comparison.medians
    scale = _WIDTH / max(sample.step for sample in medians.values())
    drawing.text(24, top + 18, comparison.workload.title, size=13, anchor="start", bold=True)
    drawing.text(24, top + 36, f"a batch of {comparison.workload.batch}", size=11, anchor="start", fill=FAINT)
    y = top + _HEAD
    for name, sample in medians.items():
        drawing.text(_LEFT - 10, y + 14, comparison.title_of(name), anchor="end")
        drawing.rect(_LEFT, y, sample.step * scale, _BAR, fill=_REST)
        x = _LEFT
        for number, part in enumerate(PARTS):
            width = sample.parts.get(part, 0.0) * scale
            drawing.rect(x, y, width, _BAR, fill=_fill(number))
            x += width
        end = max(x, _LEFT + sample.step * scale)
        drawing.text(end + 8, y + 14, format_seconds(sample.step), anchor="start", fill=FAINT)
        y += _ROW
    drawing.line([(_LEFT, top + _HEAD - 6), (_LEFT, y - 6)], stroke=INK)
    drawing.line([(24, y + 4), (_LEFT + _WIDTH + _RIGHT - 24, y + 4)], stroke=RULE)
    return y


def _legend(drawing: Drawing, y: float) -> None:
    for number, name in enumerate([*PARTS.values(), "between them"]):
        row, column = divmod(number, 4)
        x, top = 24.0 + 220 * column, y + 22 * row
        drawing.rect(x, top, 12, 12, fill=_fill(number) if number < len(PARTS) else _REST)
        drawing.text(x + 18, top + 10, name, size=11, anchor="start")


def _fill(number: int) -> str:
    return colour(number, 52)
