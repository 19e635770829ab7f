"""One display for the whole job, that costs the loop nothing."""

import contextlib
import io
import os
import pty
from collections import UserDict
from dataclasses import replace

import pytest
import torch

from phalanx.testing import ManualClock, run_ranks
from phalanx.trainer import Progress, progress
from phalanx.trainer.progress_display import ProgressState, final_line, live_line


class Reading:
    """A number that counts how often it is read, as a GPU's would make the loop wait each time."""

    def __init__(self):
        self.reads = 0

    def __float__(self):
        self.reads += 1
        return 0.5


def bar_over(iterable, clock, *, live=True, per_step=None, world_size=1):
    out = io.StringIO()
    bar = Progress(
        iterable,
        total=len(iterable),
        desc="epoch",
        unit="samples",
        per_step=per_step,
        live=live,
        out=out,
        world_size=world_size,
        clock=clock,
    )
    return bar, out


def test_it_gives_the_same_items(capsys):
    assert list(progress([1, 2, 3])) == [1, 2, 3]
    assert list(progress(iter("ab"))) == ["a", "b"]
    assert list(progress([])) == []
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_piped_it_is_one_plain_line_for_each_loop(capsys):
    bar = progress([torch.zeros(4, 2)] * 5, desc="epoch 1")
    for _ in range(2):
        for _ in bar:
            bar.update(loss=torch.tensor(0.25))
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("epoch 1: 20 samples in ")
        assert line.endswith("samples/s, loss 0.25\n")
        assert "\r" not in line


def test_live_it_draws_ten_times_a_second_at_most_and_reads_the_loss_only_then():
    clock = ManualClock()
    loss = Reading()
    bar, out = bar_over([0] * 1000, clock)
    for _ in bar:
        bar.update(loss=loss)
        clock.turn(0.002)
    drawn = out.getvalue().split("\r")
    assert 18 <= len(drawn) - 1 <= 20
    assert loss.reads == len(drawn)  # and once for the line that stays
    assert "500 samples/s" in drawn[0]
    assert drawn[-1].startswith("epoch: 1,000 samples in 2.0 s, 500 samples/s, loss 0.5")


def test_a_shorter_line_covers_the_longer_one_before():
    clock = ManualClock()
    bar, out = bar_over([0] * 2, clock)
    for _ in bar:
        clock.turn(0.1)
    first, second, last = out.getvalue().split("\r")
    assert len(last.rstrip("\n")) == max(len(first), len(second))


def test_a_break_and_an_error_finish_the_line():
    clock = ManualClock()
    for error in (None, ZeroDivisionError):
        bar, out = bar_over([1, 2, 3], clock)
        with contextlib.suppress(ZeroDivisionError):
            for item in bar:
                clock.turn(1)
                if item == 2:
                    if error is None:
                        break
                    raise error
        del item
        assert out.getvalue().endswith("\n")


def test_the_rate_is_that_of_all_ranks():
    clock = ManualClock()
    bar, out = bar_over([0] * 10, clock, per_step=32, world_size=4)
    for _ in bar:
        clock.turn(0.5)
    assert bar.samples_per_s == 10 * 32 * 4 / 5
    assert "1,280 samples in 5.0 s, 256 samples/s" in out.getvalue()


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(7, 2), torch.zeros(7)), 7),
        ([[torch.zeros(3)], "x"], 3),
        ({"image": torch.zeros(2, 9), "label": torch.zeros(2)}, 2),
        ({"name": ["a", "b", "c"], "image": torch.zeros(3, 9)}, 3),
        (UserDict(number=4, ids=torch.zeros(6, 2)), 6),
        (torch.tensor(1.0), 1),
        ("a text", 1),
        ([], 1),
        ({}, 1),
        (None, 1),
    ],
    ids=str,
)
def test_a_batch_is_counted_by_its_first_tensor(batch, samples):
    bar, out = bar_over([batch], ManualClock(), live=False)
    list(bar)
    assert out.getvalue().startswith(f"epoch: {samples} samples")


def test_it_has_a_length_where_the_iterable_has_one():
    assert len(progress([1, 2])) == 2
    assert len(progress(iter([]), total=7)) == 7
    with pytest.raises(TypeError, match="needs total="):
        len(progress(iter([])))


def test_it_keeps_no_graph_alive():
    weight = torch.ones(1, requires_grad=True)
    bar = progress([0])
    bar.update(loss=weight * 2)
    assert not bar._values["loss"].requires_grad


def test_only_rank_0_writes(tmp_path):
    def loop(rank, world_size):
        with (tmp_path / str(rank)).open("w") as out, contextlib.redirect_stdout(out):
            for _ in progress([torch.zeros(8)] * 3, desc="epoch", live=True):
                pass
        return (tmp_path / str(rank)).read_text()

    first, second = run_ranks(loop, 2, backend="gloo")
    assert first.startswith("epoch: 48 samples")
    assert second == ""


@pytest.mark.parametrize("live", [None, False])
def test_a_terminal_shows_it_live_unless_told_otherwise(live):
    leader, follower = pty.openpty()
    try:
        with open(follower, "w", encoding="utf-8", closefd=False) as terminal, contextlib.redirect_stdout(terminal):
            bar = progress([0], live=live)
        assert bar._live is (live is None)
    finally:
        os.close(leader)
        os.close(follower)


def test_the_launchers_terminal_counts_as_ours(monkeypatch):
    monkeypatch.setenv("PHALANX_TTY", "1")
    assert progress([])._live
    assert not progress([], live=False)._live
    monkeypatch.delenv("PHALANX_TTY")
    assert not progress([])._live


# How far a loop is, in one line.


HALF = ProgressState(
    "epoch 3", "samples", steps=5, total_steps=10, samples=1500, elapsed_s=2.0, values={"loss": 0.12345}
)


def test_the_live_line_says_how_much_how_fast_and_how_long():
    assert live_line(HALF) == "epoch 3  ━━━━━━━━━━──────────  50%  750 samples/s  0:02 left  loss 0.1235"
    assert live_line(HALF, fancy=False).isascii()


def test_without_a_total_or_before_the_first_step_it_counts_and_more_steps_than_announced_are_all():
    assert live_line(replace(HALF, total_steps=None)) == "epoch 3  1,500 samples  750 samples/s  loss 0.1235"
    assert live_line(replace(HALF, total_steps=0)).startswith("epoch 3  1,500 samples")
    start = ProgressState("", "steps", 0, 10, 0, 0.0)
    assert live_line(start, fancy=False) == "--------------------   0%  0.00 steps/s"
    assert (final_line(start), start.left_s) == ("0 steps in 0.0 s, 0.00 steps/s", None)
    late = replace(HALF, steps=12)
    assert late.left_s == 0
    assert "100%" in live_line(late)


def test_long_times_have_hours_and_slow_rates_keep_their_digits():
    for elapsed_s, left in ((59, "0:59 left"), (59.9, "1:00 left"), (36000, "10:00:00 left")):
        assert left in live_line(replace(HALF, elapsed_s=elapsed_s))
    assert "0.15 samples/s" in live_line(replace(HALF, elapsed_s=10_000))


def test_the_final_line_is_plain():
    assert final_line(HALF) == "epoch 3: 1,500 samples in 2.0 s, 750 samples/s, loss 0.1235"
    assert final_line(replace(HALF, desc="", values={})) == "1,500 samples in 2.0 s, 750 samples/s"
