"""A step is recorded and drawn beside its schedule: where the time went, who held others up, what would be better."""

import io
import re
import xml.dom.minidom
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn
from torch.nn import functional

import phalanx
from phalanx._base.svg import colour
from phalanx.cli.explain import command
from phalanx.pipeline.explanation import draw, ideal, plain, report, show
from phalanx.pipeline.failure import draw_failure
from phalanx.pipeline.recording import LayerTime, Recording, load_recording, parse_action
from phalanx.pipeline.schedule import SCHEDULES, Action, plan_schedule
from phalanx.pipeline.simulate import simulate
from phalanx.testing import run_ranks


def explain(*arguments):
    return CliRunner().invoke(command, ["pipeline", *map(str, arguments)])


def _recording():
    """Two stages of two layers, of which the last takes ten times as long; as `simulate` plays it, 1 ms a unit."""
    schedule = plan_schedule("1f1b", 2, 4)
    units = {0: 2.0, 1: 11.0}
    timeline = simulate(schedule, lambda a: 1e-3 * units[a.stage] * (2 if a.kind == "B" else 1))
    spans = []
    for ran in timeline.ranks:
        due = 0.0
        spans.append([])
        for span in ran:
            spans[-1].append((span.action, due, span.begin, span.end))
            due = span.end
    units = [[1, 1], [1, 10]]
    layers = [[LayerTime(f"{2 * s + i}", 1e-3 * n, 2e-3 * n) for i, n in enumerate(ns)] for s, ns in enumerate(units)]
    return Recording(schedule, tuple(map(tuple, spans)), tuple(map(tuple, layers)))


def test_a_report_names_the_bottleneck_and_a_better_balance():
    recording = _recording()
    assert recording.bottleneck == 1
    assert recording.waited(1) == pytest.approx(2e-3)
    assert recording.suggestion.counts == (3, 1)
    lines = report(recording)
    assert lines[0].startswith("recorded: 138 ms, bubble")
    assert "<- the others wait for it" in lines[2]
    assert "[2, 2] layers per stage; [3, 1] (stages begin at 3) would take" in lines[3]
    better = simulate(recording.schedule, lambda a: {0: 3e-3, 1: 10e-3}[a.stage] * (2 if a.kind == "B" else 1))
    assert recording.suggestion.seconds == pytest.approx(better.seconds)


def test_a_recording_is_saved_and_drawn_beside_its_schedule(tmp_path):
    path, picture = tmp_path / "run.json", tmp_path / "run.svg"
    _recording().save(path)
    assert load_recording(path) == _recording()
    done = explain("--recording", path, "--svg", picture)
    assert done.exit_code == 0, done.output
    assert "1f1b: 2 stages on 2 ranks, 4 micro-batches" in done.output
    assert len(re.findall(r"^rank \d \|", done.output, re.MULTILINE)) == 4
    assert "would take" in done.output
    texts = [node.firstChild.data for node in xml.dom.minidom.parse(str(picture)).getElementsByTagName("text")]
    assert sum(text.startswith(("schedule", "recorded")) for text in texts) == 2
    assert explain("--recording", path, "--stages", 3).exit_code == 2
    path.write_text("{}")
    assert "is no recording of a pipeline" in explain("--recording", path).output


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_cell_of_a_schedule_is_drawn(name):
    schedule = plan_schedule(name, 3, 5)
    lines = plain(schedule, ideal(schedule))
    for rank, order in enumerate(schedule.orders):
        for action in order:
            label = str(action) if schedule.num_stages > 3 else f"{action.kind}{action.micro_batch}"
            assert re.search(rf"\b{label}[- ]|\b{label}$", lines[rank]), (lines[rank], label)
    cells = xml.dom.minidom.parseString(draw(schedule, ideal(schedule))).getElementsByTagName("rect")
    assert len(cells) >= sum(map(len, schedule.orders))


def test_a_failure_marks_its_cell():
    done = explain("--stages", 4, "--micro-batches", 8, "--schedule", "1f1b", "--failed", "1B3")
    assert "B3xxx" in done.output.splitlines()[5]
    assert done.output.count("xxx") == 1
    schedule = plan_schedule("1f1b", 4, 8)
    assert ">failed<" in draw(schedule, ideal(schedule), failed=Action("B", 1, 3))
    assert "no cell of this schedule" in explain("--failed", "7B3").output
    assert "is no action of a pipeline" in explain("--failed", "oops").output
    assert parse_action("12W3") == Action("W", 12, 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_of_a_large_schedule_what_is_around_the_failure_is_drawn(name):
    """It was left out: of a failure nothing but numbers was told."""
    schedule = plan_schedule(name, 12, 64)
    stage = schedule.num_stages - 2
    for action in (order := schedule.orders[schedule.rank_of(stage)])[0], order[len(order) // 2], order[-1]:
        lines = draw_failure(schedule, action)
        assert len(lines) == 8
        assert max(map(len, lines)) < 180
        (marked,) = (line for line in lines if "x" in line)
        assert marked.startswith(f"rank {schedule.rank_of(stage)}")


def test_the_command_says_what_it_draws_and_refuses_what_cannot_be():
    done = explain("--stages", 4, "--micro-batches", 8, "--schedule", "1f1b")
    assert done.exit_code == 0
    assert "bubble     27.3%" in done.output
    assert "in flight  4, 3, 2, 1 micro-batches" in done.output
    assert explain("--schedule", "2f2b").exit_code == 2
    assert explain("--schedule", "interleaved", "--stages", 5, "--ranks", 2).exit_code == 2


def test_a_run_is_recorded_on_all_ranks(tmp_path):
    def train(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        pipe = phalanx.Pipeline(model, micro_batches=4, loss_fn=functional.mse_loss)
        x = torch.zeros(8, 8)
        with pipe.recorded() as record:
            pipe.step(x, target=x)
        if rank == 0:
            record.recording.save(tmp_path / "run.json")
        return str(record)

    shown, same = run_ranks(train, 2)
    assert shown == same
    assert shown.splitlines()[0] == "as planned"
    assert "recorded: " in shown
    recording = load_recording(tmp_path / "run.json")
    schedule = plan_schedule("1f1b", 2, 4)
    assert [[span[0] for span in spans] for spans in recording.spans] == [list(order) for order in schedule.orders]
    assert [[layer.name for layer in stage] for stage in recording.layers] == [["0", "1"], ["2", "3"]]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for stage in recording.layers for layer in stage)
    assert all(due <= begin <= end for spans in recording.spans for _, due, begin, end in spans)


class FailsInBackward(torch.autograd.Function):
    """In that of the samples that begin with a one."""

    @staticmethod
    def forward(ctx, x):
        ctx.fails = x[0, 0] == 1
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 1 if not ctx.fails else 1 / 0


class Failing(nn.Module):
    def forward(self, x):
        return FailsInBackward.apply(x)


def test_every_rank_has_the_cell_that_failed_and_what_ran_before_it_in_every_schedule(tmp_path):
    """Each had its own part alone, without the cell that failed; those that waited for it had marked where they did."""

    def train(rank, world_size):
        found = []
        x = torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None].expand(4, 3).contiguous()
        for name in SCHEDULES:
            pipe = phalanx.Pipeline(
                nn.Sequential(nn.Linear(3, 3), nn.Identity(), Failing(), nn.Linear(3, 3), nn.Identity()),
                micro_batches=4, schedule=name, loss_fn=functional.mse_loss,
                balance=[1, 1, 2, 1] if name == "interleaved" else [3, 2],
            )  # fmt: skip
            if rank == 0:
                nn.init.eye_(pipe._own.get_submodule("0").weight)
                nn.init.zeros_(pipe._own.get_submodule("0").bias)
            with pytest.raises((ZeroDivisionError, phalanx.PhalanxError)), pipe.recorded() as record:
                pipe.step(x, target=x)
            record.recording.save(tmp_path / f"{name}-{rank}.json")
            found.append(str(record))
        return found

    first, second = run_ranks(train, 2)
    assert first == second
    for name, shown in zip(SCHEDULES, first, strict=True):
        stage = 2 if name == "interleaved" else 0
        failed = Action("W" if name == "zero_bubble" else "B", stage, 2)  # nobody waits for its I
        assert f"recorded: the step failed in {failed}" in shown
        lines = shown.splitlines()
        assert all("x" in lines[at] for at in (1, 4)), "in the plan, and as it ran"
        assert not any("x" in lines[at] for at in (2, 5))
        recording = load_recording(tmp_path / f"{name}-1.json")
        assert recording.failed == failed
        assert recording.spans == load_recording(tmp_path / f"{name}-0.json").spans
        for spans, order in zip(recording.spans, recording.schedule.orders, strict=True):
            assert tuple(action for action, *_ in spans) == order[: len(spans)]
        assert recording.spans[0][-1][0] == failed
        picture = draw(recording.schedule, ideal(recording.schedule), recording, recording.failed)
        assert picture.count(colour(1, 50)) == 3, "in the legend, the plan, and as it ran"


def test_a_grid_wider_than_the_terminal_is_shown_in_pieces():
    """Its right side was cut off."""
    schedule = plan_schedule("interleaved", 2, 8)
    written = io.StringIO()
    show(schedule, ideal(schedule), Console(file=written, width=60), Action("B", 1, 7))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    pieces = {rank: "".join(line[7:] for line in lines if line.startswith(f"rank {rank}")) for rank in (0, 1)}
    for rank, line in enumerate(plain(schedule, ideal(schedule), Action("B", 1, 7))):
        assert pieces[rank].rstrip() == line[8:]


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_the_drawings_of_the_documentation_are_what_the_tool_makes(name, tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    path = tmp_path / "drawn.svg"
    done = explain("--stages", 4, "--micro-batches", 8, "--schedule", name, "--svg", path)
    assert path.read_text() == (docs / "images" / f"pipeline-{name.replace('_', '-')}.svg").read_text()
    if name == "1f1b":
        assert done.output.partition("Drawn")[0].strip() in (docs / "how-to" / "pipeline.md").read_text()
