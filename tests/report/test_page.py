"""Pages of runs that were made up: whole with whatever was measured, and nothing of a run is taken for HTML."""

import math
import random
from itertools import pairwise

import pytest
from tests.report.pages import Page
from tests.report.test_findings import measured, rank

from phalanx.report.axes import linear, logarithmic, plain
from phalanx.report.charts import HEIGHT, WIDTH, Line, line_chart
from phalanx.report.compare import compare_page, compare_rows
from phalanx.report.findings import find
from phalanx.report.measurements import ENDS, Collectives, Event
from phalanx.report.page import render
from phalanx.report.units import rate, seconds, size, three_digits


def generated(draw):
    curve = tuple((i, draw.choice([draw.random(), math.nan, 1e9])) for i in range(draw.choice([0, 1, 2, 50])))
    ranks = [
        rank(n, step_curve=curve, host=draw.choice(["one", "two"]), generations=((0, 1.0), (1, 3.0)))
        for n in range(draw.choice([0, 1, 3, 20]))
    ]
    rows = tuple(
        Collectives(draw.choice(["all_reduce", "barrier"]), draw.choice([0, 4, 1e9]), 2, 5, 1e-4, 1e-4,
                    draw.choice([None, 1e9]))
        for _ in range(draw.choice([0, 1, 30]))
    )  # fmt: skip
    return measured(
        *ranks, loss=curve, collectives=rows, copy_bytes_per_s=draw.choice([{}, {"one": 1e10}]),
        end=draw.choice(ENDS),
        events=tuple(Event(draw.random() * 60, "failure", "<b>&'\"", draw.choice([None, 0]), "<i>") for _ in range(2)),
        name="<script>alert(1)</script>", command="a & b <c>",
    )  # fmt: skip


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
