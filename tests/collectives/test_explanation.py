"""What people are shown comes from the schedule, and from nothing else."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from phalanx._comm.schedules import ring
from phalanx._comm.schedules.symbolic import Value
from phalanx._tools.explain import drawing, steps
from phalanx._tools.explain.steps import chunk_name, value_text
from phalanx.collectives import Topology, build

from .conftest import every_schedule

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs" / "images"


def test_chunks_are_letters_that_never_run_out() -> None:
    assert [chunk_name(chunk) for chunk in (0, 25, 26, 51, 52, 701, 702)] == ["a", "z", "aa", "az", "ba", "zz", "aaa"]


def test_values_are_sums_of_parts_until_they_grow_too_long() -> None:
    assert value_text(None, 0, 4) == "·"
    assert value_text(Value(frozenset({1}), 1), 2, 4) == "c1"
    assert value_text(Value(frozenset({3, 0, 1}), 9), 0, 4) == "a0+a1+a3"
    assert value_text(Value(frozenset({0, 1, 2, 4, 6, 7}), 9), 1, 9) == "b[0-2,4,6-7]"
    assert value_text(Value(frozenset(range(9)), 9), 1, 9) == "Σb"


def test_a_step_says_who_hands_what_to_whom_and_what_each_rank_then_holds() -> None:
    scenes = list(steps.walk_steps(ring.all_reduce(3)))
    assert [view.title for view in scenes] == [
        "Before",
        "Step 1 of 4: scatter-reduce 1 of 2",
        "Step 2 of 4: scatter-reduce 2 of 2",
        "Step 3 of 4: all-gather 1 of 2",
        "Step 4 of 4: all-gather 2 of 2",
    ]
    assert scenes[2].moves == (
        "rank 0 → rank 1  combine b0+b2",
        "rank 1 → rank 2  combine c0+c1",
        "rank 2 → rank 0  combine a1+a2",
    )
    assert [[cell.text for cell in row] for row in scenes[2].cells] == [
        ["a0+a1+a2", "b0+b2", "c0"],
        ["a1", "b0+b1+b2", "c0+c1"],
        ["a1+a2", "b2", "c0+c1+c2"],
    ]
    assert [[cell.written for cell in row] for row in scenes[2].cells] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert all(cell.final for row in scenes[-1].cells for cell in row)


@pytest.mark.slow
def test_plain_text_and_terminal_tell_every_schedule() -> None:
    for schedule in every_schedule(range(1, 4)):
        if schedule.world_size > 5:
            continue
        lines = list(steps.plain(schedule))
        screen = io.StringIO()
        steps.show(schedule, Console(file=screen, width=200, force_terminal=True))
        transfers = sum(len(list(step.phase.transfers(step.within))) for step in schedule.steps())
        assert sum("→" in line for line in lines) == transfers
        assert screen.getvalue().count("→") == transfers
        assert not any("\x1b" in line for line in lines)


def test_five_ranks_fit_a_terminal_of_80_columns() -> None:
    screen = io.StringIO()
    steps.show(ring.all_reduce(5), Console(file=screen, width=80, force_terminal=True))
    assert "…" not in screen.getvalue()


def test_an_explanation_too_long_to_read_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 ranks can be shown step by step, got 65"):
        next(steps.walk_steps(ring.all_reduce(65)))


@pytest.mark.slow
def test_a_drawing_has_an_arrow_for_each_transfer_and_dashes_for_copies() -> None:
    for schedule in every_schedule(range(1, 5)):
        if schedule.world_size * schedule.num_chunks > drawing.MOST_BOXES:
            continue
        root = ElementTree.fromstring(drawing.draw(schedule))
        arrows = [path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]
        kinds = [t.kind for step in schedule.steps() for t in step.phase.transfers(step.within)]
        assert len(arrows) == len(kinds)
        assert sum("stroke-dasharray" in arrow.attrib for arrow in arrows) == kinds.count("copy")


def test_nothing_is_drawn_outside_the_page() -> None:
    for schedule in (ring.all_reduce(5), build("hierarchical", "all_reduce", Topology.of_sizes([3, 2]))):
        root = ElementTree.fromstring(drawing.draw(schedule))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for rect in root.iter(f"{SVG}rect"):
            x, y = float(rect.attrib.get("x", 0)), float(rect.attrib.get("y", 0))
            assert 0 <= x <= x + float(rect.attrib["width"]) <= width
            assert 0 <= y <= y + float(rect.attrib["height"]) <= height


def test_a_drawing_too_large_to_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 400 boxes in a row and 38 steps.*Use fewer ranks"):
        drawing.draw(ring.all_reduce(20))


def test_the_drawings_in_the_documentation_are_those_of_the_schedules() -> None:
    assert (DOCS / "ring.svg").read_text(encoding="utf-8") == drawing.draw(ring.all_reduce(5))
