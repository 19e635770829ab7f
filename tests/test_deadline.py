import math
import threading
from datetime import timedelta

import pytest

from phalanx.deadline import Deadline, join_all
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


def test_threads_are_joined_for_so_long_in_all_and_the_one_that_calls_is_not():
    gate = threading.Event()
    waiting = [threading.Thread(target=gate.wait, daemon=True) for _ in range(3)]
    ended = threading.Thread(target=int)
    for thread in (*waiting, ended):
        thread.start()
    join_all([threading.current_thread(), *waiting, ended], 0.05)
    assert all(thread.is_alive() for thread in waiting)
    gate.set()
    join_all(waiting, 60.0)
    assert not any(thread.is_alive() for thread in waiting)
