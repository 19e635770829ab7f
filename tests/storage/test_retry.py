"""What may go away is tried again within a stated time, and told; what lasts is raised at once."""

from __future__ import annotations

import errno

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.storage import is_transient, retry
from phalanx.testing import ManualClock


class Failing:
    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_failures_that_go_away_are_told_once_with_how_long_they_are_tried(caplog):
    clock, paused = ManualClock(), []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        clock.turn(seconds)

    function = Failing(ConnectionResetError("gone"), TimeoutError("late"), OSError(errno.EIO, "broken"))
    assert retry(function, "writing x", Deadline.after(30.0, clock), pause=pause) == "done"
    assert paused == [0.1, 0.2, 0.4]
    assert [record.getMessage() for record in caplog.records] == [
        "writing x: ConnectionResetError: gone. Retrying for up to 30 s.",
        "writing x: succeeded after 3 failures.",
    ]


def test_when_the_time_is_over_the_last_failure_is_raised_and_told(caplog):
    clock = ManualClock()
    function = Failing(*(TimeoutError(f"late {number}") for number in range(100)))
    with pytest.raises(TimeoutError, match="late 9"):
        retry(function, "writing x", Deadline.after(20.0, clock), pause=clock.turn)
    assert caplog.messages[1:] == ["writing x: gave up after 10 failures in 20 s."]
    assert function.calls == 10  # after 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3, 20 seconds


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "no"), PermissionError(13, "no"), OSError(errno.ENOSPC, "full"), ValueError("no")]
)
def test_what_lasts_is_raised_at_once(error):
    function = Failing(error)
    assert not is_transient(error)
    with pytest.raises(type(error)):
        retry(function, "writing x", Deadline.after(30.0))
    assert function.calls == 1
