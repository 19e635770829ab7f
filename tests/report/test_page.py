"""Pages of runs that were made up: whole with whatever was measured, and nothing of a run is taken for HTML."""

import dataclasses
import math
import random
import re
from itertools import pairwise

import pytest
from rich.console import Console
from tests.report.measured import measured, rank
from tests.report.pages import Page

from phalanx._job.report.axes import linear, logarithmic, plain
from phalanx._job.report.charts import HEIGHT, WIDTH, Line, line_chart
from phalanx._job.report.compare import compare_page, compare_rows, print_comparison
from phalanx._job.report.findings import find
from phalanx._job.report.measurements import ENDS, CollectiveTimes, RunEvent
from phalanx._job.report.page import machine_table, render
from phalanx._job.report.pictures import part_bars
from phalanx._job.report.units import rate, seconds, size, three_digits


def generated(draw):
    curve = tuple((i, draw.choice([draw.random(), math.nan, 1e9])) for i in range(draw.choice([0, 1, 2, 50])))
    ranks = [
        rank(n, step_curve=curve, host=draw.choice(["one", "two"]), generations=((0, 1.0), (1, 3.0)))
        for n in range(draw.choice([0, 1, 3, 20]))
    ]
    rows = tuple(
        CollectiveTimes(draw.choice(["all_reduce", "barrier"]), draw.choice([0, 4, 1e9]), 2, 5, 1e-4, 1e-4,
                    draw.choice([None, 1e9]))
        for _ in range(draw.choice([0, 1, 30]))
    )  # fmt: skip
    return measured(
        *ranks, loss=curve, collectives=rows, copy_bytes_per_s=draw.choice([{}, {"one": 1e10}]),
        end=draw.choice(ENDS),
        events=tuple(RunEvent(draw.random() * 60, "failure", "<b>&'\"", draw.choice([None, 0]), "<i>") for _ in "ab"),
        name="<script>alert(1)</script>", command="a & b <c>",
    )  # fmt: skip


@pytest.mark.slow
def test_every_page_is_whole():
    draw = random.Random(5)
    for _ in range(60):
        run = generated(draw)
        page = Page(render(run, find(run)))
        assert page.problems == []
        assert "<script>alert(1)</script>" in page.text
        other = generated(draw)
        compared = Page(compare_page(["a", "b<"], [run, other]))
        assert compared.problems == []
        assert len(compared.tables[0]) == len(compare_rows([run, other])) + 1


def test_names_of_folders_are_no_markup():
    run = generated(random.Random(1))
    with (console := Console(width=200)).capture() as shown:
        print_comparison(console, ["runs/opt[adam]", "b[/x]"], compare_rows([run, run]))
    assert "runs/opt[adam]" in shown.get()
    assert "b[/x]" in shown.get()


def test_axes_hold_their_values_at_round_marks():
    draw = random.Random(2)
    for _ in range(2000):
        values = [draw.choice([1, -1]) * 10 ** draw.uniform(-9, 9) for _ in range(draw.randint(1, 5))]
        axis = linear(values, from_zero=draw.random() < 0.5)
        hair = 1e-8 * (axis.high - axis.low)
        assert axis.low <= min(values) + hair
        assert axis.high >= max(values) - hair
        assert 2 <= len(axis.marks) <= 9
        text = plain(axis.marks)
        assert len({text(mark) for mark in axis.marks}) == len(axis.marks)
        assert all(-1e-8 <= axis.place(value) <= 1 + 1e-8 for value in values)
        axis = logarithmic([abs(value) for value in values])
        assert all(-1e-6 <= axis.place(abs(value)) <= 1 + 1e-6 for value in values)


def test_labels_of_lines_stay_apart_and_inside():
    lines = [Line([(0, 1.0), (1, 1.0 + i / 1000)], "red", f"rank {i}") for i in range(8)]
    picture = line_chart("t", lines, linear([0, 1]), linear([0, 2]), x_name="x", y_name="y")
    page = Page(f"<!DOCTYPE html><div>{picture}</div>")
    assert page.problems == []
    at = sorted(float(part.split('"')[0]) for part in picture.split(' y="')[1:] if 'fill="red"' in part.split(">")[0])
    assert len(at) == 8
    assert all(b - a >= 14.9 for a, b in pairwise(at))
    assert 0 < at[0] < at[-1] < HEIGHT < WIDTH


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (seconds, 0.0123, "12.3 ms"), (seconds, 75.0, "75.0 s"), (seconds, 187.0, "3:07 min"),
        (seconds, 7510, "2:05:10 h"), (seconds, 0, "0 s"), (size, 4096, "4.00 KiB"), (size, 7, "7 B"),
        (rate, 7.28e9, "7.28 GB/s"), (three_digits, 1234.5, "1,234"), (three_digits, 0.00148, "0.00148"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_and_a_unit(call, value, text):
    assert call(value) == text


def bars_of(html):
    """The labels of the bars, in their order."""
    return re.findall(r"<span>([^<]*)</span><div class=bar>", html)


def test_of_many_ranks_those_that_differ_stand_first_and_the_others_are_one_bar():
    ranks = [rank(number, parts={"data": 0.03 * number} if number in (3, 9) else {}) for number in range(40)]
    bars = part_bars(measured(*ranks))
    assert bars_of(bars) == ["rank 9", "rank 3", "the other 38"]
    assert "38 of 40 ranks are shown as one" in bars
    assert bars_of(part_bars(measured(*ranks[:16]))) == [f"rank {number}" for number in range(16)]


def test_of_many_ranks_that_all_differ_the_most_different_have_bars():
    ranks = [rank(number, parts={"data": 0.02 * number}) for number in range(40)]
    labels = bars_of(part_bars(measured(*ranks)))
    assert labels[-1] == "ranks 8-32"
    assert len(labels) == 16
    assert set(labels[:2]) == {"rank 0", "rank 39"}


def test_runs_side_by_side_have_their_steps_on_one_scale_and_a_logarithm_where_one_has_it():
    fast, slow = measured(rank(0)), measured(rank(0, parts={"backward": 0.2}))
    falling = dataclasses.replace(fast, loss=tuple((step, 100.0 / (1 + step)) for step in range(200)))
    page = compare_page(["a/fast", "b/slow"], [falling, slow])
    assert bars_of(page) == ["fast", "slow"]
    assert "loss, logarithmic" in page
    flat = dataclasses.replace(slow, loss=tuple((step, 2.0 + step / 100) for step in range(100)))
    assert "loss, logarithmic" not in compare_page(["a", "b"], [flat, flat])


def test_a_rank_that_waits_is_not_said_to_have_little_of_a_core_without_the_reason():
    waiting = measured(
        rank(0, parts={"waiting": 0.5}, cpu_share=0.09), rank(1), rank(2, parts={"data": 0.2}, cpu_share=0.3)
    )
    table = machine_table(waiting)
    assert "9 %, as it waits for other ranks 84 %" in table
    assert "30 %, as it waits for data 67 %" in table
    assert "<td>98 %</td>" in table
