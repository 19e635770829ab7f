import math
from datetime import timedelta

import pytest

from phalanx.deadline import Deadline
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
