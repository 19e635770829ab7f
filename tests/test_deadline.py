import math
import time
from datetime import timedelta

import pytest

from phalanx._base.deadline import Deadline
from phalanx.testing import ManualClock


@pytest.mark.parametrize("timeout", [30, 30.0, timedelta(seconds=30)])
def test_a_span_becomes_a_point_in_time(timeout):
    clock = ManualClock(100.0)
    deadline = Deadline.after(timeout, clock=clock)
    assert (deadline.at, deadline.timeout_s) == (130.0, 30.0)
    assert (deadline.left_s, deadline.passed) == (30.0, False)


def test_time_that_is_left_never_goes_below_zero():
    clock = ManualClock()
    deadline = Deadline.after(1, clock=clock)
    clock.turn(5)
    assert (deadline.left_s, deadline.passed) == (0.0, True)


def test_a_timeout_of_zero_has_passed_at_once():
    assert Deadline.after(0, clock=ManualClock()).passed


def test_no_timeout_never_comes():
    clock = ManualClock()
    deadline = Deadline.after(None, clock=clock)
    clock.turn(1e12)
    assert (deadline.left_s, deadline.passed) == (math.inf, False)


@pytest.mark.parametrize("timeout", [-1, -0.1, math.nan, timedelta(seconds=-1)])
def test_a_span_that_makes_no_sense_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be zero or more seconds, got"):
        Deadline.after(timeout)


def test_the_real_clock_is_monotonic():
    deadline = Deadline.after(1000)
    assert 0 < deadline.left_s <= 1000
    assert not deadline.passed


def test_what_comes_true_ends_a_wait_and_is_asked_again_until_then():
    answers = iter([False, False, True])
    looks: list[int] = []
    assert Deadline.after(60).wait_until(lambda: next(answers), 1e-4, check=lambda: looks.append(1))
    assert len(looks) == 2
    assert not list(answers)


def test_a_wait_whose_time_has_come_asks_once_more():
    clock, asked = ManualClock(), []

    def is_so():
        asked.append(clock())
        clock.turn(1)
        return len(asked) > limit

    limit = 5
    assert not Deadline.after(2.5, clock=clock).wait_until(is_so, 1e-4)
    assert len(asked) == 3
    assert not Deadline.after(0, clock=clock).wait_until(is_so, 1e-4)
    limit = 0
    assert Deadline.after(0, clock=clock).wait_until(is_so, 1e-4)


def test_what_is_looked_around_for_may_end_a_wait():
    def look():
        raise PermissionError("enough")

    with pytest.raises(PermissionError, match="enough"):
        Deadline.after(None).wait_until(lambda: False, 1e-4, check=look)


@pytest.mark.parametrize(
    ("pauses", "slept"), [((0.5,), [0.5] * 4), ((0.5, 1.5), [0.5, 1.0, 1.5, 1.5]), ((2.0, 1.0), [2.0] * 4)]
)
def test_pauses_double_up_to_the_longest(monkeypatch, pauses, slept):
    seen: list[float] = []
    monkeypatch.setattr(time, "sleep", seen.append)
    assert Deadline.after(60).wait_until(lambda: len(seen) == 4, *pauses)
    assert seen == slept
