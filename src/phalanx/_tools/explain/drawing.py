"""Draw a schedule as one picture: a column for each rank, a row for each step, an arrow for each transfer.

A box is a rank's value of a chunk. A filled box is a final value. The ticks at the foot of a box stand for the ranks:
in an unfilled box, the ticks of ranks whose contribution is included are dark.
"""

from __future__ import annotations

import textwrap

from phalanx._base.svg import FAINT, INK, PAPER, RULE, Drawing, colour
from phalanx._comm.schedules.schedule import Schedule
from phalanx._comm.schedules.symbolic import Snapshot, Value, trace
from phalanx._tools.explain.steps import chunk_name, headline

MOST_BOXES = 160
MOST_STEPS = 40

_LEFT, _TOP, _RIGHT, _FOOT = 150.0, 96.0, 24.0, 64.0
_BOX_HEIGHT, _GAP, _BETWEEN_RANKS = 32.0, 58.0, 22.0


def draw(schedule: Schedule) -> str:
    """Return the schedule as SVG.

    Raises:
        ValueError: too many ranks, chunks or steps for a readable page.
    """
    boxes = schedule.world_size * schedule.num_chunks
    if boxes > MOST_BOXES or schedule.num_steps > MOST_STEPS:
        raise ValueError(
            f"{schedule.algorithm} {schedule.operation} for {schedule.world_size} ranks has {boxes} boxes in a row and "
            f"{schedule.num_steps} steps; a readable drawing holds {MOST_BOXES} and {MOST_STEPS}. Use fewer ranks"
        )
    page = _Page(schedule)
    snapshots = list(trace(schedule))
    page.bands()
    for row, snapshot in enumerate(snapshots):
        page.arrows(row, snapshot)
    for row, snapshot in enumerate(snapshots):
        page.boxes(row, snapshot)
    page.legend(len(snapshots))
    return str(page.drawing)


class _Page:
    """A `_Page` holds the layout of the picture."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.box = max(30.0, 3.0 * schedule.world_size + 10.0, 64.0 if schedule.num_chunks == 1 else 0.0)
        self.rank_width = self.box * schedule.num_chunks
        width = _LEFT + _RIGHT + schedule.world_size * (self.rank_width + _BETWEEN_RANKS) - _BETWEEN_RANKS
        title, order = headline(schedule)
        # Estimate the width of the text, because no font can be measured here.
        width = max(width, 680.0, 48 + 10.4 * len(title))
        lines = textwrap.wrap(order, int((width - 48) / 6.8))
        self.top = _TOP + 16 * (len(lines) - 1)
        height = self.row_top(schedule.num_steps) + _BOX_HEIGHT + _FOOT
        self.drawing = Drawing(width, height, title)
        self.width = width
        self.drawing.text(24, 34, title, size=17, anchor="start", bold=True)
        for i, line in enumerate(lines):
            self.drawing.text(24, 54 + 16 * i, line, size=12, anchor="start", fill=FAINT)
        for rank in range(schedule.world_size):
            x = self.box_left(rank, 0) + self.rank_width / 2
            self.drawing.text(x, self.top - 12, f"rank {rank}", size=13, bold=True)

    def row_top(self, row: int) -> float:
        return self.top + row * (_BOX_HEIGHT + _GAP)

    def box_left(self, rank: int, chunk: float) -> float:
        return _LEFT + rank * (self.rank_width + _BETWEEN_RANKS) + chunk * self.box

    def bands(self) -> None:
        """Draw a tinted band behind each phase, and a label for each step."""
        row = 0
        for number, phase in enumerate(phase for phase in self.schedule.phases if phase.num_steps):
            top = self.row_top(row) + _BOX_HEIGHT + 4
            height = phase.num_steps * (_BOX_HEIGHT + _GAP)
            self.drawing.rect(
                12, top, self.width - 24, height, fill="#f4f6f9" if number % 2 == 0 else "#eef6f0", radius=8
            )
            for within in range(phase.num_steps):
                y = self.row_top(row + within) + _BOX_HEIGHT + _GAP / 2
                where, _, name = phase.name.rpartition(": ")
                if where:
                    self.drawing.text(24, y - 8, where, anchor="start", fill=FAINT, size=11)
                    y += 8
                self.drawing.text(24, y, name, anchor="start", bold=True)
                step = f"step {within + 1} of {phase.num_steps}"
                self.drawing.text(24, y + 16, step, anchor="start", fill=FAINT, size=11)
            row += phase.num_steps

    def arrows(self, row: int, snapshot: Snapshot) -> None:
        """Draw arrows from the boxes of the row above to the boxes of this row."""
        for t in snapshot.transfers:
            middle = (t.start + t.stop) / 2
            start = (self.box_left(t.src, middle), self.row_top(row - 1) + _BOX_HEIGHT + 1)
            end = (self.box_left(t.dst, middle), self.row_top(row) - 2)
            stroke = colour(t.start) if t.width == 1 else INK
            thick = 1.8 if t.width == 1 else 2.6
            self.drawing.arrow(start, end, stroke=stroke, width=thick, dashed=t.kind == "copy")
            if t.width > 1:  # a bracket over all the transferred chunks
                for y, rank in ((start[1], t.src), (end[1] + 1, t.dst)):
                    ends = [(self.box_left(rank, t.start) + 3, y), (self.box_left(rank, t.stop) - 3, y)]
                    self.drawing.line(ends, stroke=INK, width=1.6)

    def boxes(self, row: int, snapshot: Snapshot) -> None:
        """Draw every rank's values after the step."""
        written = {(t.dst, chunk) for t in snapshot.transfers for chunk in range(t.start, t.stop)}
        for rank, values in enumerate(snapshot.state):
            for chunk, value in enumerate(values):
                x, y = self.box_left(rank, chunk), self.row_top(row)
                self.value(x + 1, y, chunk, value, written=(rank, chunk) in written)

    def value(self, x: float, y: float, chunk: int, value: Value | None, *, written: bool) -> None:
        width = self.box - 2
        if value is None:
            self.drawing.rect(x, y, width, _BOX_HEIGHT, fill=PAPER, stroke=RULE, radius=4, dashed=True)
            return
        final = len(value.contributors) == self.schedule.contributions
        dark, light = colour(chunk), colour(chunk, 92)
        self.drawing.rect(
            x, y, width, _BOX_HEIGHT, fill=dark if final else light, stroke=dark if written or final else RULE,
            stroke_width=1.6 if written else 1, radius=4,
        )  # fmt: skip
        self.drawing.text(x + width / 2, y + 16, chunk_name(chunk), size=13, fill=PAPER if final else dark, bold=True)
        tick = (width - 8) / self.schedule.world_size
        for rank in range(self.schedule.world_size):
            inside = rank in value.contributors
            fill = (PAPER if final else dark) if inside else (dark if final else colour(chunk, 82))
            self.drawing.rect(x + 4 + rank * tick + 0.4, y + 22, tick - 0.8, 5, fill=fill)

    def legend(self, rows: int) -> None:
        """Draw the legend."""
        y = self.row_top(rows - 1) + _BOX_HEIGHT + 36
        self.drawing.line([(24, y - 4), (56, y - 4)], stroke=INK, width=1.8)
        self.drawing.text(62, y, "combine", anchor="start", fill=FAINT)
        self.drawing.line([(128, y - 4), (160, y - 4)], stroke=INK, width=1.8, dashed=True)
        self.drawing.text(166, y, "copy", anchor="start", fill=FAINT)
        self.drawing.text(
            214, y, "Ticks: ranks included. Filled: final. Outlined: written in the step.", anchor="start",
            fill=FAINT,
        )  # fmt: skip
