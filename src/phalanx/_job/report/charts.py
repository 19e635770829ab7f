"""Draw curves and points as pictures in a page: data in, SVG out, in the page's own colours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx._base.svg import Drawing
from phalanx._job.report.axes import Axis, plain

WIDTH, HEIGHT = 480, 230  # half the width of a page, or the width of a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 22, 14, 40
_INK, _FAINT, _RULE = "var(--ink)", "var(--faint)", "var(--rule)"
_LABEL_GAP = 15


@dataclass(frozen=True)
class Line:
    """A `Line` is a curve, its colour (a CSS value), and the label at its end."""

    points: Sequence[tuple[float, float]]
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Dot:
    """A `Dot` is a point, its label, and its tooltip."""

    x: float
    y: float
    label: str = ""
    tooltip: str = ""


def line_chart(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    x_name: str,
    y_name: str,
    y_text: Callable[[float], str] | None = None,
    x_text: Callable[[float], str] | None = None,
) -> str:
    """Return curves over a common x as SVG, with separated labels at their right ends."""
    has_labels = any(line.label for line in lines)
    right = _RIGHT + (8 * max(len(line.label) for line in lines) if has_labels else 0)
    frame = _Frame(title, x, y, right, x_text, y_text, x_name, y_name)
    ends = []
    for line in lines:
        points = [(frame.x(px), frame.y(py)) for px, py in line.points if math.isfinite(py)]
        for part in _without_gaps(line.points, points):
            if len(part) == 1:
                frame.drawing.circle(*part[0], 2.5, fill=line.colour)
            else:
                frame.drawing.line(part, stroke=line.colour, width=2, name=line.label)
        if line.label and points:
            ends.append((points[-1][1], line.label, line.colour))
    for at, label, colour in _apart(ends):
        frame.drawing.text(WIDTH - right + 6, at + 4, label, size=12, fill=colour, anchor="start", bold=True)
    return frame.drawing.inline(frame.scale)


def dot_chart(
    title: str,
    dots: Sequence[Dot],
    x: Axis,
    y: Axis,
    *,
    x_name: str,
    y_name: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    limit: tuple[float, str] | None = None,
) -> str:
    """Return points as SVG, with labels beside them, and a line at `limit`."""
    frame = _Frame(title, x, y, _RIGHT, x_text, y_text, x_name, y_name)
    if limit is not None:
        frame.rule(*limit)
    taken = [(frame.x(dot.x) - 7, frame.y(dot.y), 14.0) for dot in dots]  # left end, y, width
    for dot in dots:
        px, py = frame.x(dot.x), frame.y(dot.y)
        frame.drawing.circle(px, py, 5, fill="var(--c1)", stroke="var(--paper)", tooltip=dot.tooltip)
        width = 6.6 * len(dot.label)
        for start, anchor in ((px + 9, "start"), (px - 9 - width, "end")):  # right, else left, else none
            inside = start >= _LEFT and start + width <= WIDTH - 4
            if dot.label and inside and _is_free(taken, start, py, width):
                taken.append((start, py, width))
                at = start if anchor == "start" else px - 9
                frame.drawing.text(at, py + 4, dot.label, size=12, fill=_INK, anchor=anchor)
                break
    return frame.drawing.inline()


def _is_free(taken: Sequence[tuple[float, float, float]], start: float, y: float, width: float) -> bool:
    """Return whether a label fits at a position; `taken` has the left end, y and width of each dot and other label."""
    return all(abs(y - ty) > 12 or start + width <= tx or start >= tx + tw for tx, ty, tw in taken)


class _Frame:
    """A `_Frame` is the axes of a chart, and maps values to positions."""

    def __init__(
        self,
        title: str,
        x: Axis,
        y: Axis,
        right: float,
        x_text: Callable[[float], str] | None,
        y_text: Callable[[float], str] | None,
        x_name: str,
        y_name: str,
    ) -> None:
        self._x, self._y = x, y
        self._names = x_name, y_name
        self._x0, self._x1 = _LEFT, WIDTH - right
        self._y0, self._y1 = HEIGHT - _BOTTOM, _TOP + 14
        self.drawing = Drawing(WIDTH, HEIGHT, title)
        y_text, x_text = y_text or plain(y.marks), x_text or plain(x.marks)
        for mark in y.marks:
            at = self.y(mark)
            self.drawing.line([(self._x0, at), (self._x1, at)], stroke=_RULE)
            self.drawing.text(self._x0 - 8, at + 4, y_text(mark), size=12, fill=_FAINT, anchor="end")
        shown = [mark for mark in x.marks if x.low <= mark <= x.high]
        for mark in shown:
            at = self.x(mark)
            self.drawing.line([(at, self._y0), (at, self._y0 + 4)], stroke=_FAINT)
            self.drawing.text(at, self._y0 + 18, x_text(mark), size=12, fill=_FAINT)
        self.drawing.text(0, _TOP, y_name, size=12, fill=_FAINT, anchor="start")
        self.drawing.text(self._x1, HEIGHT - 5, x_name, size=12, fill=_FAINT, anchor="end")

    @property
    def scale(self) -> str:
        """Return the position and range of the axes, for the page's script."""
        x, y = self._x, self._y
        return json.dumps(
            {
                "x": [self._x0, self._x1, x.low, x.high, x.is_log, self._names[0]],
                "y": [self._y0, self._y1, y.low, y.high, y.is_log, self._names[1]],
            },
            separators=(",", ":"),
        )

    def x(self, value: float) -> float:
        return self._x0 + (self._x1 - self._x0) * min(1.0, max(0.0, self._x.place(value)))

    def y(self, value: float) -> float:
        return self._y0 - (self._y0 - self._y1) * min(1.0, max(0.0, self._y.place(value)))

    def rule(self, value: float, label: str) -> None:
        """Draw a horizontal line with a label above it."""
        at = self.y(value)
        self.drawing.line([(self._x0, at), (self._x1, at)], stroke="var(--c5)", width=1.5, dashed=True)
        self.drawing.text(self._x0 + 6, at - 5, label, size=12, fill="var(--c5)", anchor="start")


def _without_gaps(
    values: Sequence[tuple[float, float]], points: Sequence[tuple[float, float]]
) -> list[list[tuple[float, float]]]:
    """Return the points in pieces, split where a value is NaN or infinite."""
    parts: list[list[tuple[float, float]]] = [[]]
    rest = iter(points)
    for _, value in values:
        if math.isfinite(value):
            parts[-1].append(next(rest))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _apart(ends: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Return the labels, moved as little as needed so that they do not overlap."""
    placed: list[tuple[float, str, str]] = []
    for at, label, colour in sorted(ends):
        if placed:
            at = max(at, placed[-1][0] + _LABEL_GAP)
        placed.append((at, label, colour))
    over = placed[-1][0] - (HEIGHT - _BOTTOM) if placed else 0.0
    if over > 0:
        for i in range(len(placed) - 1, -1, -1):
            limit = placed[i + 1][0] - _LABEL_GAP if i + 1 < len(placed) else HEIGHT - _BOTTOM
            placed[i] = (min(placed[i][0], limit), *placed[i][1:])
    return placed
