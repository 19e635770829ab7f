"""Choose the contents of a run's charts and bars; `charts` draws the charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.report.axes import Axis, linear, logarithmic, nice_step
from phalanx._job.report.charts import Dot, Line, dot_chart, line_chart
from phalanx._job.report.measurements import PARTS, Curve, Measurements, RankRun
from phalanx._job.report.units import percent, rate, seconds, size

_MAX_LINES = 8  # the maximum number of ranks that a chart can distinguish
_MAX_DOT_LABELS = 8
MANY_RANKS = 16  # with more ranks, ranks that are alike are shown as one
_ALIKE = 0.05  # two steps that differ by at most this share look the same to a reader
_MOST_LETTERS = 24  # the maximum number of letters in a bar's label
_ON_DARK = ("backward", "update", "waiting")


def figure(picture: str, title: str, caption: str = "") -> str:
    """Return a picture with its title and caption."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{picture}{below}</figure>"


def loss_picture(run: Measurements) -> str:
    """Draw the loss by step."""
    finite = [loss for _, loss in run.loss if math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    is_log, y = loss_axis(finite)
    picture = line_chart(
        "Loss by step",
        [Line(run.loss, "var(--c1)")],
        Axis(0, max(step for step, _ in run.loss), linear([0, *(step for step, _ in run.loss)]).marks),
        y,
        x_name="step",
        y_name="loss, logarithmic" if is_log else "loss",
        y_text=(lambda value: f"{value:g}") if is_log else None,
    )
    return figure(picture, "Loss", "For each step: the value on which backward() was called, averaged over the ranks.")


def loss_axis(losses: Sequence[float]) -> tuple[bool, Axis]:
    """Return whether the axis for these losses is logarithmic, and the axis."""
    is_log = min(losses) > 0 and max(losses) > 50 * min(losses)
    return is_log, logarithmic(losses) if is_log else linear(losses)


def throughput_picture(run: Measurements) -> str:
    """Draw samples, or steps, per second by time."""
    if len(run.throughput) < 3:
        return ""
    unit = "samples" if run.has_samples else "steps"
    y = linear([value for _, value in run.throughput], from_zero=True)
    curve = [Line(run.throughput, "var(--c1)")]
    x = time_axis([at for at, _ in run.throughput])
    picture = line_chart(
        "Throughput by time", curve, x, y, x_name="time", y_name=f"{unit} a second", x_text=seconds_mark
    )
    return figure(picture, "Throughput", f"{unit.capitalize()} of all ranks together.")


def step_picture(run: Measurements) -> str:
    """Draw how long a step takes, by time and rank."""
    curves = [(rank.rank, rank.step_curve) for rank in run.last_attempt if len(rank.step_curve) > 2]
    if not curves:
        return ""
    points = [value for _, curve in curves for _, value in curve]
    usual = sorted(points)[int(0.98 * (len(points) - 1))]
    factor, unit = (1e3, "ms") if usual < 1 else (1.0, "s")
    y = linear([factor * min(value, 1.5 * usual) for value in points], from_zero=True)
    lines = _rank_lines([(rank, tuple((x, factor * v) for x, v in curve)) for rank, curve in curves])
    x = time_axis([at for _, curve in curves for at, _ in curve])
    picture = line_chart(
        "Time of a step by time and rank", lines, x, y, x_name="time", y_name=f"{unit} a step", x_text=seconds_mark
    )
    return figure(picture, "Time of a step", _lines_told(len(curves)))


def memory_picture(run: Measurements) -> str:
    """Draw the memory of each rank by time."""
    curves = [(rank.rank, rank.memory_curve) for rank in run.last_attempt if len(rank.memory_curve) > 2]
    if not curves:
        return ""
    most = max(value for _, curve in curves for _, value in curve)
    factor, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    lines = _rank_lines([(rank, tuple((x, v / factor) for x, v in curve)) for rank, curve in curves])
    y = linear([value for line in lines for _, value in line.points], from_zero=True)
    x = time_axis([at for _, curve in curves for at, _ in curve])
    on_device = any(rank.device_bytes for rank in run.last_attempt)
    picture = line_chart("Memory by time and rank", lines, x, y, x_name="time", y_name=unit, x_text=seconds_mark)
    what = "Of tensors on the device." if on_device else "Resident; shared pages count for each rank."
    return figure(picture, "Memory", f"{what} {_lines_told(len(curves))}".strip())


def bandwidth_picture(run: Measurements) -> str:
    """Draw collectives by size and bandwidth, against the bandwidth of a copy in memory."""
    rows = [row for row in run.collectives if row.bandwidth and row.num_bytes >= 1]
    if not rows:
        return ""
    limit = max(run.copy_bytes_per_s.values(), default=0.0)
    several_hosts = len({rank.host for rank in run.last_attempt}) > 1
    x = logarithmic([row.num_bytes for row in rows], 4.0, most=6)
    y = logarithmic([*(row.bandwidth or 0.0 for row in rows), *([limit] if limit else [])])
    dots = [
        Dot(
            row.num_bytes,
            row.bandwidth or 0.0,
            row.name.replace("_", " ") if i < _MAX_DOT_LABELS else "",
            f"{row.name}, {size(row.num_bytes)}, {row.num_ranks} ranks: {rate(row.bandwidth or 0.0)}, "
            f"{row.count:,.0f} calls",
        )
        for i, row in enumerate(rows)
    ]
    picture = dot_chart(
        "Bandwidth of collectives by size", dots, x, y, x_name="bytes of a rank", y_name="bandwidth",
        x_text=lambda value: size(value).replace(".00", "").replace(".0", ""),
        y_text=lambda value: rate(value).replace(".00", "").replace(".0", ""),
        limit=(limit, f"one core's copy in memory, {rate(limit)}") if limit else None,
    )  # fmt: skip
    caption = "Bus bandwidth, as in nccl-tests, from the arrival of the last rank to the end; medians."
    if several_hosts:
        caption += " Between hosts the network is the limit, not memory."
    return figure(picture, "Bandwidth by size", caption)


@dataclass(frozen=True)
class StepBar:
    """A `StepBar` is a mean step to draw as a bar: its label, its parts, and the total time."""

    label: str
    parts: Mapping[str, float]
    step_s: float


def part_bars(run: Measurements) -> str:
    """Return a bar for each rank: its step, divided into activities.

    With many ranks, the ranks that differ come first, and one bar represents all others.
    """
    different, alike = _divide_alike([rank for rank in run.last_attempt if rank.step_s > 0])
    bars = [StepBar(f"rank {rank.rank}", rank.parts, rank.step_s) for rank in different]
    if alike:
        name = name_ranks(sorted(rank.rank for rank in alike))
        label = name if len(name) <= _MOST_LETTERS else f"the other {len(alike)}"
        bars.append(StepBar(label, *mean_step(alike)))
    note = (
        f"<p class='small faint'>{len(alike)} of {len(different) + len(alike)} ranks are shown as one, by their mean: "
        "their steps differ little.</p>"
        if alike
        else ""
    )
    return step_bars(bars) + note if bars else ""


def mean_step(ranks: Sequence[RankRun]) -> tuple[dict[str, float], float]:
    """Return the mean over these ranks of a step's parts, and of its total time."""
    parts = {part: sum(rank.parts[part] for rank in ranks) / len(ranks) for part in PARTS}
    return parts, sum(rank.step_s for rank in ranks) / len(ranks)


def _divide_alike(ranks: Sequence[RankRun]) -> tuple[list[RankRun], list[RankRun]]:
    """Return the ranks to show one by one (of many ranks, the most different first), and the ranks to show as one."""
    if len(ranks) <= MANY_RANKS:
        return list(ranks), []
    usual = {part: median(rank.parts[part] for rank in ranks) for part in PARTS}
    step_s = median(rank.step_s for rank in ranks)

    def differs(rank: RankRun) -> float:
        return max(abs(rank.parts[part] - usual[part]) for part in PARTS) / step_s

    ordered = sorted(ranks, key=differs, reverse=True)
    number = min(sum(differs(rank) > _ALIKE for rank in ranks), MANY_RANKS - 1)
    return ordered[:number], ordered[number:]


def step_bars(bars: Sequence[StepBar]) -> str:
    """Return steps as bars on one scale, below a legend."""
    longest = max(bar.step_s for bar in bars)
    shown = [part for part in PARTS if any(bar.parts[part] > 0.001 * longest for bar in bars)]
    legend = "".join(f"<li><i style='background:var(--{part})'></i>{part}</li>" for part in shown)
    rows = "".join(
        f"<span>{escape(bar.label)}</span><div class=bar>{''.join(_piece(bar, part, longest) for part in shown)}</div>"
        f"<span>{seconds(bar.step_s)}</span>"
        for bar in bars
    )
    return f"<ul class=legend>{legend}</ul><div class=bars>{rows}</div>"


def _piece(bar: StepBar, part: str, longest: float) -> str:
    share = bar.parts[part] / bar.step_s
    on_dark = " class=on-dark" if part in _ON_DARK else ""
    told = escape(f"{bar.label}, {part}: {seconds(bar.parts[part])}, {percent(share)} of its step", quote=True)
    width = 100 * bar.parts[part] / longest
    return f"<i{on_dark} style='width:{width:.2f}%;background:var(--{part})' title='{told}'><b>{percent(share)}</b></i>"


def time_line(run: Measurements) -> str:
    """Draw when the processes of each rank ran, and how they ended."""
    if not run.ranks or run.duration_s <= 0:
        return ""
    end = max(run.duration_s, *(rank.end for rank in run.ranks))

    def place(at: float) -> str:
        return f"{100 * min(1.0, max(0.0, at / end)):.2f}%"

    rows = []
    for number in sorted({rank.rank for rank in run.ranks}):
        bars = []
        for one in sorted((r for r in run.ranks if r.rank == number), key=lambda r: r.begin):
            trains = min(one.first_step if one.first_step is not None else one.end, one.end)
            told = f"process {one.pid}" + (f", attempt {one.attempt + 1}" if one.attempt else "")
            until = "until its first step" if one.steps else "no step"
            bars.append(_bar(place(one.begin), (trains - one.begin) / end, "start", f"{told}: {until}"))
            if one.steps:
                bars.append(_bar(place(trains), (one.end - trains) / end, "", f"{told}: {one.steps:,} steps"))
            bars += [
                f"<u style='left:{place(at)};background:var(--c4)' title='generation {generation}, {seconds(at)}'></u>"
                for generation, at in one.generations
                if generation
            ]
        bars += [
            f"<u style='left:{place(event.at)}' "
            f"title='{escape(f'{event.kind}, {seconds(event.at)}: {event.text}')}'></u>"
            for event in run.events
            if event.rank == number
        ]
        rows.append(f"<span>rank {number}</span><div class=lane>{''.join(bars)}</div>")
    axis = time_axis([0.0, end])
    scale = "".join(
        f"<span style='left:{place(mark)}'>{seconds_mark(mark)}</span>" for mark in axis.marks if 0 <= mark <= end
    )
    before = "before its first step" + ("" if all(rank.steps for rank in run.ranks) else ", or without one")
    words = [f"<li><i style='background:var(--other)'></i>{before}</li>"]
    if run.steps:
        words.append("<li><i style='background:var(--c0)'></i>training</li>")
    if any(event.rank is not None for event in run.events):
        words.append("<li><i style='background:var(--bad)'></i>failure or loss</li>")
    if any(generation for rank in run.ranks for generation, _ in rank.generations):
        words.append("<li><i style='background:var(--c4)'></i>a new generation of the group</li>")
    return (
        f"<ul class=legend>{''.join(words)}</ul><div class=lanes>{''.join(rows)}<span></span>"
        f"<div class=scale>{scale}</div></div>"
    )


def _bar(left: str, width: float, kind: str, told: str) -> str:
    name = f" class={kind}" if kind else ""
    return f"<i{name} style='left:{left};width:{100 * max(0.0, width):.2f}%' title='{escape(told)}'></i>"


def time_axis(times: Sequence[float]) -> Axis:
    """Return an axis from the first time to the last, with marks at round seconds, minutes or hours."""
    low, high = min(times), max(times)
    low = 0.0 if low < 0.3 * high else low
    rough = max(high - low, 1e-6) / 5
    steps = [s for s in (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0) if s >= rough > 30]
    step = steps[0] if steps else nice_step(rough)
    first = math.ceil(low / step - 1e-9)
    return Axis(low, high, tuple(step * i for i in range(first, math.floor(high / step + 1e-9) + 1)))


def seconds_mark(value: float) -> str:
    """Return a time as a mark: `0`, `30 s`, `5 min`, `2 h`."""
    for factor, unit in ((3600, "h"), (60, "min")):
        if value >= factor and value % factor == 0:
            return f"{value / factor:.0f} {unit}"
    return f"{value:g} s" if value < 60 else f"{int(value // 60)}:{int(value % 60):02} min"


def _rank_lines(curves: Sequence[tuple[int, Curve]]) -> list[Line]:
    """Return a line for each rank; of many ranks, label only the lowest and highest, and draw the rest faintly."""
    if len(curves) <= _MAX_LINES:
        return [Line(curve, f"var(--c{i + 1})", f"rank {rank}") for i, (rank, curve) in enumerate(curves)]
    last = sorted(curves, key=lambda pair: sum(value for _, value in pair[1]) / len(pair[1]))
    named = {last[0][0]: "var(--c1)", last[-1][0]: "var(--c2)"}
    lines = [Line(curve, "var(--rule)") for rank, curve in curves if rank not in named]
    return lines + [Line(curve, named[rank], f"rank {rank}") for rank, curve in curves if rank in named]


def _lines_told(number: int) -> str:
    return "" if number <= _MAX_LINES else f"{number} ranks; the lowest and the highest are named."


__all__ = [
    "MANY_RANKS", "StepBar", "bandwidth_picture", "figure", "loss_axis", "loss_picture", "mean_step", "memory_picture",
    "part_bars", "step_bars", "step_picture", "throughput_picture", "time_axis", "time_line",
]  # fmt: skip
