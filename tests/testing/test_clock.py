import pytest

from phalanx._base.deadline import Deadline
from phalanx.testing import ManualClock


def test_a_deadline_passes_when_the_clock_is_turned_to_it():
    clock = ManualClock(100.0)
    deadline = Deadline.after(5, clock=clock)
    clock.turn(4.5)
    assert (deadline.left_s, deadline.passed) == (0.5, False)
    clock.turn(0.5)
    assert (deadline.left_s, deadline.passed) == (0.0, True)


def test_the_clock_never_goes_back():
    with pytest.raises(ValueError, match="cannot be turned back: got -1 seconds"):
        ManualClock().turn(-1)
