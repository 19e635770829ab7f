"""How far a loop is, in one line."""

from dataclasses import replace

from phalanx.trainer.line import ProgressState, final_line, live_line

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
