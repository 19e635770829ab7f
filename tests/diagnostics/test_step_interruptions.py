"""A signal's handler raises wherever Python is, also in the recorder of steps; the program may catch that and go on."""

import os
import random
import signal
import sys

import pytest
from tests.diagnostics.loops import EVENTS, FIELDS, LOOP, Clock

from phalanx._comm.diagnostics import (
    interruptions,
    operation_sampler,
    step_file,
    step_machine,
    step_recorder,
    step_records,
)
from phalanx._comm.diagnostics.interruptions import is_interruption
from phalanx._comm.diagnostics.step_file import read_folder
from phalanx._comm.diagnostics.step_machine import (
    BEGIN_BACKWARD,
    END_BACKWARD_WITH_LOSS,
    STEP,
    StepMachine,
)
from phalanx._comm.diagnostics.step_recorder import StepRecorder

OURS = {
    module.__file__
    for module in (interruptions, operation_sampler, step_file, step_machine, step_recorder, step_records)
}


class Alarm(Exception):
    """What the program's own handler raises."""


def ring(signum, frame):
    raise Alarm("the program's own")


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGUSR1, ring)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def recorder(tmp_path):
    recorder = StepRecorder(str(tmp_path / "0.steps"), {"rank": 3}, Clock())
    yield recorder
    recorder.close(ended=False)


def at_call(number, action, function):
    """`function`, which does `action` once, at its so-manieth call."""
    calls = iter(range(1, sys.maxsize))

    def called(*given):
        found = function(*given)
        if next(calls) == number:
            action()
        return found

    return called


def written(tmp_path):
    (found,) = read_folder(tmp_path)
    return found


def test_an_alarm_that_comes_while_events_are_made_into_records_reaches_the_program(
    tmp_path, recorder, monkeypatch, alarm, capsys
):
    """The recorder took it for a fault of its own, told so and ended; the program never saw its own alarm."""
    monkeypatch.setattr(StepMachine, "feed", at_call(3, alarm, StepMachine.feed))
    rung = 0
    for _ in range(10):
        recorder.mark(STEP)
        try:
            recorder.log.take()
        except Alarm:
            rung += 1
    recorder.close(ended=True)
    assert (rung, written(tmp_path).steps_done, written(tmp_path).ended) == (1, 10, True)
    assert capsys.readouterr().err == ""


def test_what_fails_in_what_the_recorder_asks_ends_nothing(tmp_path, recorder, capsys):
    """One question to PyTorch that failed ended recording, and `close` raised it again: no report was written."""

    def fail(*given):
        raise ValueError("no such thing")

    recorder.on_first_step = recorder.device_memory = recorder.rank_now = fail
    for _ in range(3):
        recorder.mark(STEP)
    recorder.close(ended=True)
    assert (written(tmp_path).steps_done, written(tmp_path).ended) == (3, True)
    assert capsys.readouterr().err == ""


def test_a_recorder_that_has_failed_closes(tmp_path, recorder, monkeypatch, capsys):
    """`close` raised again what had ended the recording, and left the file open and not said to be ended."""
    for _ in range(3):
        recorder.mark(STEP)
    monkeypatch.setattr(recorder, "_save_state", lambda: 1 / 0)
    recorder.mark(STEP)
    recorder.close(ended=True)
    assert (written(tmp_path).steps_done, written(tmp_path).ended) == (4, True)
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_a_recorder_closes_when_an_interruption_comes_then(tmp_path, recorder, monkeypatch, alarm):
    for _ in range(3):
        recorder.mark(STEP)
    monkeypatch.setattr(recorder, "_measure_process", lambda now: alarm())
    with pytest.raises(Alarm):
        recorder.close(ended=True)
    recorder.mark(STEP)  # nobody listens any more
    assert (written(tmp_path).steps_done, written(tmp_path).ended) == (3, True)


def test_a_handler_that_asks_for_the_steps_while_they_are_taken_counts_none_twice(recorder, monkeypatch):
    """The same events were fed to the machine twice."""
    monkeypatch.setattr(StepMachine, "feed", at_call(2, lambda: recorder.num_steps, StepMachine.feed))
    for _ in range(4):
        recorder.mark(STEP)
    assert recorder.num_steps == 4


def test_a_state_that_does_not_fit_leaves_the_one_before(tmp_path):
    """It was written as none at all: a reader counted the steps from the first event that was still there."""
    file = step_file.StepFile(tmp_path / "a.steps", 0.0, 0.0)
    file.set_state('{"taken": 7}')
    file.set_state('{"taken": 8, "too": "' + "x" * 8200 + '"}')
    file.close()
    assert step_file.read_state((tmp_path / "a.steps").read_bytes()) == {"taken": 7}


def test_an_error_of_ones_own_is_no_interruption():
    def own(frame):
        return {}["none"]

    with pytest.raises(KeyError) as caught:
        own(None)
    assert not is_interruption(caught.value)
    assert is_interruption(KeyboardInterrupt())


class Interrupt:
    """A tracer that raises at the so-manieth line of the recorder's modules from here on."""

    def __init__(self, lines, error):
        self.left, self.error, self.raised = lines, error, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            self.left -= 1
            if self.left <= 0:
                self.raised = True
                raise self.error("the program's own")
        return self


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_interrupted_at_any_line_no_step_is_lost_and_none_counts_twice(tmp_path, monkeypatch, seed):
    """A hundred steps were told as 117: the next look began with the events that had been taken already.

    The same loop runs into two recorders, one of which is interrupted: both have the same steps, to the word, and so
    has whoever reads the file at any moment.
    """
    draw = random.Random(seed)
    clocks = Clock(), Clock()
    recorders = []
    for name, clock in zip(("whole", "interrupted"), clocks, strict=True):
        (tmp_path / name).mkdir()
        recorders.append(StepRecorder(str(tmp_path / name / "0.steps"), {"rank": 3}, clock))
        monkeypatch.setattr(recorders[-1], "_measure_process", lambda now: None)
    whole, interrupted = recorders
    num_raised = 0

    def noted(kind, value):
        for recorder, clock in zip(recorders, clocks, strict=True):
            clock.now += 0.001
            recorder.mark(kind, value)

    for _ in range(draw.choice((100, 1000, 2030))):  # near to where records are merged
        noted(BEGIN_BACKWARD, 0.0)
        noted(END_BACKWARD_WITH_LOSS, 1.0)
        noted(STEP, 0.0)
    for _ in range(80):
        events = draw.choice((LOOP, LOOP, [draw.choice(EVENTS)], [(STEP, 0)])) * draw.choice((1, 20))
        for kind, value in events:
            noted(kind, value)
        whole.log.take()
        for _ in range(draw.choice((1, 1, 3))):
            lines = draw.choice((draw.randrange(1, 60), draw.randrange(1, 3000)))
            interrupt = Interrupt(lines, draw.choice((KeyboardInterrupt, Alarm)))
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                interrupted.log.take()
            except (KeyboardInterrupt, Alarm):
                num_raised += 1
            finally:
                sys.settrace(before)
        left = [read_folder(tmp_path / name)[0] for name in ("whole", "interrupted")]
        assert left[0].steps_done == left[1].steps_done
        if draw.random() < 0.5:
            assert whole.num_steps == interrupted.num_steps
            left = [read_folder(tmp_path / name)[0] for name in ("whole", "interrupted")]
            for field in FIELDS:
                assert getattr(left[0], field) == getattr(left[1], field), field
    assert num_raised > 30
    for recorder in recorders:
        recorder.close(ended=True)
    left = [read_folder(tmp_path / name)[0] for name in ("whole", "interrupted")]
    for field in FIELDS:
        assert getattr(left[0], field) == getattr(left[1], field), field
