"""Draw a pipeline schedule as a grid, a row per rank and a cell per action: as text, on a terminal or as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx._base.svg import FAINT, INK, PAPER, RULE, Drawing, colour
from phalanx.pipeline.schedule import Action, Kind, PipelineSchedule
from phalanx.pipeline.simulate import Timeline, ideal_efficiency, simulate, unit_seconds

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = 400  # the widest useful drawing
_STYLES = {"F": "black on cyan", "B": "black on green", "I": "black on green", "W": "black on yellow"}
_LIGHTNESS = {"F": 72, "B": 48, "I": 48, "W": 60}
_HUES = {"F": 0, "B": 2, "I": 2, "W": 3}
_CHUNKS = 3  # stages of a rank with different colours; further stages repeat them


def ideal(schedule: PipelineSchedule, backward: float = 2.0) -> Timeline:
    """Return the timeline of a schedule with equal stages and zero transfer time."""
    return simulate(schedule, unit_seconds(schedule, backward))


def facts(schedule: PipelineSchedule, timeline: Timeline) -> list[str]:
    """Return a heading and a schedule's key numbers, one per line."""
    per_rank = schedule.num_stages // schedule.num_ranks
    in_flight = ", ".join(str(schedule.in_flight(stage)) for stage in range(schedule.num_stages))
    bound = 1.0 - ideal_efficiency(schedule.num_ranks, schedule.micro_batches, per_rank)
    speed = schedule.num_ranks * (1.0 - timeline.bubble)
    ranks = "one rank" if schedule.num_ranks == 1 else f"{schedule.num_ranks} ranks"
    formula = "(p-1)/(m+p-1)" if per_rank == 1 else f"(p-1)/({per_rank}m+p-1)"
    return [
        f"{schedule.name}: {schedule.num_stages} stages on {ranks}, {schedule.micro_batches} micro-batches",
        f"  bubble     {timeline.bubble:.1%} of the ranks' time; {formula} is {bound:.1%}",
        f"  speed      {speed:.2f} times one rank, if all stages take the same time",
        f"  in flight  {in_flight} micro-batches on stages 0 to {schedule.num_stages - 1}: what memory must hold",
    ]


def grid(
    schedule: PipelineSchedule, timeline: Timeline, failed: Action | None = None, columns: int | None = _COLUMNS
) -> list[list[tuple[str, str]]]:
    """Return each rank's line as pieces (text, kind): kind is an action's, '.' for a wait, '!' for `failed`."""
    shortest = min((s.end - s.begin for spans in timeline.ranks for s in spans if s.end > s.begin), default=1.0)
    label = max((len(_label(schedule, s.action)) for spans in timeline.ranks for s in spans), default=1)
    per_unit = (label + 1) / shortest
    if columns is not None and timeline.seconds * per_unit > columns:
        per_unit = columns / timeline.seconds
    lines = []
    for spans in timeline.ranks:
        line: list[tuple[str, str]] = []
        at = 0
        for span in spans:
            begin, end = (round((t - timeline.begin) * per_unit) for t in (span.begin, span.end))
            if begin > at:
                line.append(("." * (begin - at), "."))
            begin = max(begin, at)
            if span.action == failed:
                end = max(end, begin + 2)  # at least two columns
            width = end - begin
            if width <= 0:
                continue
            text = _label(schedule, span.action)[: width - 1] if width > 1 else ""
            mark = "!" if span.action == failed else span.action.kind
            if mark == "!" and len(text) == width - 1:
                text = ""  # too narrow for both
            fill = "x" if mark == "!" else "-"
            line.append(((text + fill * (width - 1 - len(text)) + " ")[:width], mark))
            at = end
        lines.append(line)
    return lines


def _label(schedule: PipelineSchedule, action: Action) -> str:
    if schedule.num_stages > schedule.num_ranks:
        return str(action)
    return f"{action.kind}{action.micro_batch}"


def plain(
    schedule: PipelineSchedule, timeline: Timeline, failed: Action | None = None, *, columns: int | None = _COLUMNS
) -> list[str]:
    """Return the grid as text: F forward, B backward (I of inputs, W of weights), dots where a rank waits."""
    return [
        f"rank {rank} |" + "".join(text for text, _ in line).rstrip()
        for rank, line in enumerate(grid(schedule, timeline, failed, columns))
    ]


def show(schedule: PipelineSchedule, timeline: Timeline, console: Console) -> None:
    """Print the grid in colours; if it is wider than the terminal, wrap all rows together."""
    from rich.text import Text

    rows = []
    for line in grid(schedule, timeline):
        rows.append(Text(no_wrap=True, overflow="crop"))
        for text, kind in line:
            rows[-1].append(text, _STYLES.get(kind, "dim"))
    names = [f"rank {rank} ".ljust(len(f"rank {len(rows) - 1} ")) for rank in range(len(rows))]
    width = max(console.width - len(names[0]), 20)
    for begin in range(0, max(map(len, rows), default=0), width):
        if begin:
            console.print()
        for name, row in zip(names, rows, strict=True):
            console.print(Text(name, no_wrap=True, overflow="crop") + row[begin : begin + width])


def draw(schedule: PipelineSchedule, timeline: Timeline) -> str:
    """Return the grid as SVG."""
    row, left, right, top = 30.0, 70.0, 20.0, 62.0
    width = 1000.0
    height = top + row * schedule.num_ranks + 74
    title = f"{schedule.name}, {schedule.num_stages} stages, {schedule.micro_batches} micro-batches"
    page = Drawing(width, height, title)
    page.text(left, 24, title, size=15, anchor="start", bold=True)
    _legend(page, left, 44, schedule)
    scale = (width - left - right) / (timeline.seconds or 1.0)
    page.text(left, top + 12, f"schedule: bubble {timeline.bubble:.1%}", size=12, anchor="start", fill=FAINT)
    y = top + 18
    for rank, spans in enumerate(timeline.ranks):
        page.text(left - 8, y + row * 0.62, f"rank {rank}", size=12, anchor="end")
        page.rect(left, y + 2, width - left - right, row - 4, fill=RULE)
        for s in spans:
            _cell(page, schedule, s.action, left + (s.begin - timeline.begin) * scale, y + 2,
                  (s.end - s.begin) * scale, row - 4)  # fmt: skip
        y += row
    return str(page)


def _cell(
    page: Drawing, schedule: PipelineSchedule, action: Action, x: float, y: float, width: float, height: float
) -> None:
    fill = colour(_hue(schedule, action), _LIGHTNESS[action.kind])
    page.rect(x, y, max(width - 0.8, 0.3), height, fill=fill, radius=min(2.0, width / 4), stroke=PAPER)
    text = str(action.micro_batch)
    if width > 7 * len(text) + 2:
        ink = INK if action.kind == "F" else PAPER
        page.text(x + width / 2, y + height * 0.66, text, size=11, fill=ink)


def _legend(page: Drawing, x: float, y: float, schedule: PipelineSchedule) -> None:
    p, v = schedule.num_ranks, schedule.num_stages // schedule.num_ranks
    kinds: list[tuple[Kind, str]] = [("F", "forward")]
    kinds += (
        [("I", "backward of inputs"), ("W", "of weights")] if schedule.name == "zero_bubble" else [("B", "backward")]
    )
    entries = [
        (colour(_hue(schedule, Action(kind, k * p, 0)), _LIGHTNESS[kind]), text if v == 1 else _stages(text, k, p))
        for k in range(min(v, _CHUNKS))
        for kind, text in kinds
    ]
    for fill, text in [*entries, (RULE, "waiting")]:
        page.rect(x, y - 10, 12, 12, fill=fill, radius=2)
        page.text(x + 17, y, text, size=12, anchor="start")
        x += 40 + 7 * len(text)
    if x < 820:  # it fits
        page.text(x, y, "numbers are micro-batches", size=12, anchor="start", fill=FAINT)


def _hue(schedule: PipelineSchedule, action: Action) -> int:
    return _HUES[action.kind] + 4 * (action.stage // schedule.num_ranks % _CHUNKS)


def _stages(text: str, k: int, p: int) -> str:
    own = f"stage {k}" if p == 1 else f"stages {k * p} to {k * p + p - 1}"
    return f"{text}, {own}" if text == "forward" else text
