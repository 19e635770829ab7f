"""Show several runs side by side, in a terminal and as a page, or one alone in a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from phalanx._job.report.axes import Axis, linear
from phalanx._job.report.charts import Line, line_chart
from phalanx._job.report.findings import find
from phalanx._job.report.gather import find_job, of_ranks
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.measurements import PARTS, Measurements
from phalanx._job.report.page import STATES, code, document, titled
from phalanx._job.report.pictures import StepBar, figure, loss_axis, mean_step, seconds_mark, step_bars, time_axis
from phalanx._job.report.records import list_records
from phalanx._job.report.units import percent, seconds, size, three_digits
from phalanx._job.report.write import DATA, PAGE, write_report

if TYPE_CHECKING:
    from rich.console import Console

_MARKED = 0.02  # a smaller relative difference from the first run is not marked


@dataclass(frozen=True)
class Row:
    """A `Row` is one quantity of all runs: each run's value as text, and its ratio to the first run's, if meaningful.

    `better` is "less", "more", or "" if neither is better.
    """

    name: str
    cells: tuple[str, ...]
    ratios: tuple[float | None, ...] = ()
    better: str = ""


def load(folder: str) -> Measurements:
    """Return the run whose report is in `folder`; write the report first if there are records that it lacks.

    Raises:
        ValueError: the folder has neither a report nor records.
        OSError: the report can't be read or written.
    """
    path = os.path.join(folder, DATA)
    files = [file for _, file in list_records(folder)]
    job = JobRecord.read(folder)
    has_new_records = job is not None and (job.end == "running" or not os.path.exists(path))
    if has_new_records or of_ranks(find_job(folder, files), files):
        write_report(folder, keep_records=True)
    if not os.path.exists(path):
        raise ValueError(f"{folder}: no report of a run: `phalanx run --report {folder} ...` writes one")
    with open(path, encoding="utf-8", errors="replace") as file:
        try:
            return Measurements.from_json(file.read())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def compare_rows(runs: Sequence[Measurements]) -> list[Row]:
    """Return the quantities that distinguish the runs; a quantity that no run has gets no row."""
    rows = [
        Row("end", tuple(STATES[run.end][1] for run in runs)),
        Row("ranks", tuple(str(run.world_size) for run in runs)),
        _row("duration", runs, lambda run: run.duration_s, seconds, "less"),
        _row("steps", runs, lambda run: run.steps or None, lambda n: f"{n:,.0f}", ""),
        _row("a step", runs, lambda run: run.step_s or None, seconds, "less"),
        _row("samples a second", runs, lambda run: run.samples_per_s, three_digits, "more"),
        _row("last loss", runs, lambda run: run.final_loss, three_digits, ""),
        *(_row(f"  {part}", runs, _part(part), seconds, "less" if part != "other" else "") for part in PARTS),
        _row("memory of a rank, at most", runs, _peak, size, "less"),
        _row("losses, failures", runs, lambda run: float(len(run.events)), lambda n: f"{n:.0f}", ""),
    ]
    return [row for row in rows if any(row.cells)]


def _part(part: str) -> Callable[[Measurements], float | None]:
    def mean(run: Measurements) -> float | None:
        ranks = [rank for rank in run.last_attempt if rank.step_s]
        return sum(rank.parts[part] for rank in ranks) / len(ranks) if ranks else None

    return mean


def _peak(run: Measurements) -> float | None:
    return max((rank.peak_bytes for rank in run.last_attempt), default=None)


def _row(
    name: str,
    runs: Sequence[Measurements],
    value: Callable[[Measurements], float | None],
    text: Callable[[float], str],
    better: str,
) -> Row:
    values = [value(run) for run in runs]
    first = values[0]
    ratios = tuple(v / first if v is not None and first else None for v in values)
    return Row(name, tuple("" if v is None else text(v) for v in values), ratios if better else (), better)


def judge(row: Row, number: int) -> tuple[str, str]:
    """Return the text before the value in a cell, such as `-19 %`, and whether the change is good, bad or neutral."""
    ratio = row.ratios[number] if number and row.ratios else None
    if ratio is None or abs(ratio - 1) < _MARKED or row.name.startswith("  "):
        return "", ""
    return f"{100 * (ratio - 1):+.0f} %", "good" if (ratio < 1) == (row.better == "less") else "bad"


# -- in a terminal -----------------------------------------------------------------------------------------------------


def print_comparison(console: Console, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Print a column for each run, with the difference from the first run's value before each value."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    styles = {"good": "green", "bad": "red", "": ""}
    for row in rows:
        cells = []
        for i, cell in enumerate(row.cells):
            mark, kind = judge(row, i)
            cells.append(f"[{styles[kind]}]{mark}[/] {cell}" if kind else cell)
        table.add_row(row.name, *cells)
    console.print(table)


def print_run(console: Console, folder: str, run: Measurements) -> None:
    """Print the numbers of one run, and advice."""
    console.print(f"{run.name}: {STATES[run.end][1]}{f', {run.end_text}' if run.end_text else ''}", markup=False)
    for row in compare_rows([run])[1:]:
        console.print(f"  {row.name:<28}{row.cells[0]:>14}", markup=False)
    ranks = [rank for rank in run.last_attempt if rank.step_s]
    if len(ranks) > 1:
        for rank in ranks:
            shares = ", ".join(f"{p} {percent(rank.parts[p] / rank.step_s)}" for p in PARTS if rank.parts[p] > 0)
            console.print(f"  rank {rank.rank}: {shares}", markup=False)
    for finding in find(run):
        console.print(f"* {finding.text}", markup=False, soft_wrap=True)
    console.print(f"The page: {os.path.join(folder, PAGE)}", markup=False, soft_wrap=True)


# -- as a page ---------------------------------------------------------------------------------------------------------


def compare_page(names: Sequence[str], runs: Sequence[Measurements]) -> str:
    """Return a page with the runs side by side: their curves in one chart, their numbers, advice on each."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(row.name)}</td>{''.join(_cell(row, i) for i in range(len(row.cells)))}</tr>"
        for row in compare_rows(runs)
    )
    table = f"<div class=wide><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    todo = "".join(
        f"<h3>{escape(name)}</h3><ul class=findings>"
        + "".join(f"<li class={one.severity}><span>{code(one.text)}</span></li>" for one in find(run))
        + "</ul>"
        for name, run in zip(names, runs, strict=True)
    )
    sections = [
        ("Numbers", table),
        ("Curves", _curves(names, runs)),
        ("Where the time of a step goes", _steps(names, runs)),
        ("What to do", todo),
    ]
    heading = f"<header><h1>{len(runs)} runs side by side</h1></header>"
    foot = "The percentage before a number is its difference from the first run; differences below 2 % are not shown."
    return document(f"{len(runs)} runs side by side", heading + titled(sections), foot)


def _cell(row: Row, number: int) -> str:
    mark, kind = judge(row, number)
    before = f"<span class={kind}>{mark}</span> " if kind else ""
    return f"<td>{before}{escape(row.cells[number])}</td>"


def _curves(names: Sequence[str], runs: Sequence[Measurements]) -> str:
    labels = _short(names)
    colours = [f"var(--c{1 + i % 8})" for i in range(len(runs))]
    figures = []
    losses = [Line(run.loss, c, label) for run, c, label in zip(runs, colours, labels, strict=True) if run.loss]
    if losses:
        steps = [0, 1, *(step for line in losses for step, _ in line.points)]
        x = Axis(0, max(steps), linear(steps).marks)
        finite = [value for line in losses for _, value in line.points if math.isfinite(value)]
        is_log, y = loss_axis(finite or [0.0, 1.0])
        picture = line_chart(
            "Loss by step",
            losses,
            x,
            y,
            x_name="step",
            y_name="loss, logarithmic" if is_log else "loss",
            y_text=(lambda value: f"{value:g}") if is_log else None,
        )
        figures.append(figure(picture, "Loss"))
    rates = [
        Line(run.throughput, c, label) for run, c, label in zip(runs, colours, labels, strict=True) if run.throughput
    ]
    if rates:
        x = time_axis([at for line in rates for at, _ in line.points])
        y = linear([value for line in rates for _, value in line.points], from_zero=True)
        unit = "samples" if all(run.has_samples for run in runs) else "steps or samples"
        picture = line_chart(
            "Throughput by time", rates, x, y, x_name="time", y_name=f"{unit} a second", x_text=seconds_mark
        )
        figures.append(figure(picture, "Throughput"))
    return f"<div class=grid>{''.join(figures)}</div>" if figures else ""


def _steps(names: Sequence[str], runs: Sequence[Measurements]) -> str:
    """Return the mean step of each run as a bar, all on one scale."""
    bars = [
        StepBar(label, *mean_step(ranks))
        for label, run in zip(_short(names), runs, strict=True)
        if (ranks := [rank for rank in run.last_attempt if rank.step_s > 0])
    ]
    return step_bars(bars) if bars else ""


def _short(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or a number if that does not distinguish them."""
    last = [os.path.basename(os.path.normpath(name))[:14] for name in names]
    return last if len(set(last)) == len(last) else [f"run {i + 1}" for i in range(len(last))]
