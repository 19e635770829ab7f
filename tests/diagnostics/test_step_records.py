"""What a rank writes down of its steps: right to the event, bounded for any run, whole at any moment."""

import random
import threading
from array import array

import pytest
import torch
from tests.diagnostics.loops import EVENTS, FIELDS, LOOP, Clock

from phalanx._comm.diagnostics import progress_page, step_notes
from phalanx._comm.diagnostics.step_file import FILE_BYTES, WINDOW, StepFile, read_folder, read_rank_file
from phalanx._comm.diagnostics.step_machine import (
    BEGIN_BACKWARD,
    BEGIN_DATA,
    BEGIN_UPDATE,
    END_BACKWARD,
    END_BACKWARD_WITH_LOSS,
    END_DATA,
    END_UPDATE,
    END_WAIT,
    NO_DATA,
)
from phalanx._comm.diagnostics.step_recorder import StepRecorder
from phalanx._comm.diagnostics.step_records import StepRecord


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorder(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(progress_page, "_own", None)  # of a test before, whose state has committed steps
    recorder = StepRecorder(str(tmp_path / "0.steps"), {"rank": 3}, clock)
    yield recorder
    recorder.close(ended=False)


def written(tmp_path):
    (found,) = read_folder(tmp_path)
    return found


def after(clock, seconds, event, *arguments):
    clock.now += seconds
    event(*arguments)


def one_step(recorder, clock, *, data=0.1, forward=0.2, backward=0.3, update=0.4, loss=1.0):
    recorder.mark(BEGIN_DATA)
    after(clock, data, recorder.mark, END_DATA, 8.0)
    after(clock, forward, recorder.mark, BEGIN_BACKWARD)
    after(clock, backward, recorder.mark, END_BACKWARD_WITH_LOSS, loss)
    after(clock, update / 2, recorder.mark, BEGIN_UPDATE)
    after(clock, update / 2, recorder.mark, END_UPDATE)


def test_each_phase_gets_its_time_and_the_start_of_the_program_none(tmp_path, recorder, clock):
    clock.now += 50  # imports
    for number in range(3):
        one_step(recorder, clock, loss=number)
        clock.now += 0.05  # a line is printed
    recorder.close(ended=True)
    file = written(tmp_path)
    assert (file.facts["rank"], file.steps_done, file.ended, file.begun) == (3, 3, True, 100.0)
    assert [record.loss for record in file.steps] == [0, 1, 2]
    assert [record.first for record in file.steps] == [1, 2, 3]
    assert file.steps[0].begin == pytest.approx(150)
    for record in file.steps[1:]:
        assert record[4:9] == pytest.approx((0.05, 0.1, 0.2, 0.3, 0.4))
        assert record.end - record.begin == pytest.approx(1.05)
        assert record.samples == 8


def test_an_evaluation_is_no_forward(tmp_path, recorder, clock):
    one_step(recorder, clock)
    for _ in range(4):
        recorder.mark(BEGIN_DATA)
        after(clock, 1.0, recorder.mark, END_DATA, 8.0)
        clock.now += 2.0
    recorder.mark(BEGIN_DATA)
    after(clock, 0.5, recorder.mark, NO_DATA)
    one_step(recorder, clock)
    recorder.close(ended=True)
    second = written(tmp_path).steps[1]
    assert second.other == pytest.approx(12.0)
    assert second.data == pytest.approx(0.6)
    assert second.forward == pytest.approx(0.2)
    assert second.samples == 8


def test_accumulation_is_one_step_and_a_loop_without_a_loader_has_steps_too(tmp_path, recorder, clock):
    for _ in range(2):  # two batches to an update
        recorder.mark(BEGIN_DATA)
        after(clock, 0.1, recorder.mark, END_DATA, 8.0)
        after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
        after(clock, 0.3, recorder.mark, END_BACKWARD_WITH_LOSS, 0.5)
    after(clock, 0.1, recorder.mark, BEGIN_UPDATE)
    after(clock, 0.1, recorder.mark, END_UPDATE)
    for _ in range(3):  # and now by hand
        after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
        after(clock, 0.3, recorder.mark, END_BACKWARD_WITH_LOSS, 0.5)
        after(clock, 0.1, recorder.mark, BEGIN_UPDATE)
        after(clock, 0.1, recorder.mark, END_UPDATE)
    recorder.close(ended=True)
    steps = written(tmp_path).steps
    assert [step.num_steps for step in steps] == [1] * 4
    assert [step.samples for step in steps] == [16, 0, 0, 0]
    assert [step.loss for step in steps] == [1.0, 0.5, 0.5, 0.5]
    assert steps[-1].forward == pytest.approx(0.2)
    assert steps[-1].update == pytest.approx(0.2)
    assert sum(sum(step[4:9]) for step in steps) == pytest.approx(steps[-1].end - steps[0].begin)


def test_what_a_feature_waits_for_is_no_phases_time(tmp_path, recorder, clock):
    """A pipeline's bubbles counted as its forward, and what a parameter server took as the optimizer's: the report said
    to take a fused one.
    """
    for _ in range(2):
        recorder.mark(BEGIN_DATA)
        after(clock, 0.1, recorder.mark, END_DATA, 8.0)
        after(clock, 0.5, recorder.mark, END_WAIT, 0.3)
        after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
        after(clock, 0.3, recorder.mark, END_BACKWARD)
        after(clock, 0.1, recorder.mark, BEGIN_UPDATE)
        after(clock, 0.2, recorder.mark, END_WAIT, 7.0)  # no longer than the phase
        after(clock, 0.1, recorder.mark, END_UPDATE)
    recorder.close(ended=True)
    for step in written(tmp_path).steps:
        assert (step.data, step.forward, step.backward) == pytest.approx((0.1, 0.4, 0.3))
        assert (step.update, step.waited) == pytest.approx((0.2, 0.5))


def test_a_feature_tells_whoever_records_what_it_waits_for_and_its_loss(tmp_path, recorder, clock):
    step_notes.listen(recorder)
    try:
        recorder.mark(BEGIN_BACKWARD)
        after(clock, 0.2, recorder.mark, END_BACKWARD)
        clock.now += 0.5
        step_notes.note_wait(0.3, "stages")
        with step_notes.waiting_for("servers"):
            pass
        step_notes.note_loss(torch.tensor(1.5))
        recorder.mark(BEGIN_UPDATE)
        recorder.mark(END_UPDATE)
    finally:
        step_notes.stop_listening()
    step_notes.note_wait(1.0, "stages")
    recorder.close(ended=True)
    file = written(tmp_path)
    assert file.facts["waits_for"] == ["servers", "stages"]
    assert (file.steps[0].loss, file.steps[0].num_losses) == (1.5, 1)
    assert 0.3 <= file.steps[0].waited <= 0.5


def test_an_optimizer_that_is_tried_out_before_the_loop_makes_no_step(tmp_path, recorder, clock):
    """`ParameterServer` tries an optimizer out when it is made: the report had a first step of a second, of nothing."""
    recorder.mark(BEGIN_UPDATE)
    recorder.mark(END_UPDATE)
    clock.now += 10.0
    one_step(recorder, clock)
    after(clock, 0.1, recorder.mark, BEGIN_BACKWARD)  # without a loader; the second one within the optimizer's step
    recorder.mark(END_BACKWARD)
    recorder.mark(BEGIN_UPDATE)
    after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
    recorder.mark(END_BACKWARD)
    recorder.mark(END_UPDATE)
    recorder.close(ended=True)
    steps = written(tmp_path).steps
    assert len(steps) == 2
    assert steps[0].end - steps[0].begin == pytest.approx(1.0)


def test_two_optimizers_share_a_step(tmp_path, recorder, clock):
    for _ in range(3):
        recorder.mark(BEGIN_DATA)
        after(clock, 0.1, recorder.mark, END_DATA, 8.0)
        for optimizer in (1, 2):  # discriminator and generator
            after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
            after(clock, 0.3, recorder.mark, END_BACKWARD_WITH_LOSS, 0.5)
            after(clock, 0.1, recorder.mark, BEGIN_UPDATE, optimizer)
            after(clock, 0.1, recorder.mark, END_UPDATE)
    recorder.close(ended=True)
    steps = written(tmp_path).steps
    assert [step.num_steps for step in steps] == [1] * 3
    assert all(step.forward == pytest.approx(0.4) for step in steps)


def test_what_runs_inside_of_an_optimizer_or_after_its_failure_is_counted_once(tmp_path, recorder, clock):
    for _ in range(2):
        recorder.mark(BEGIN_DATA)
        after(clock, 0.1, recorder.mark, END_DATA, 8.0)
        recorder.mark(BEGIN_UPDATE)  # LBFGS calls the closure
        after(clock, 0.1, recorder.mark, BEGIN_BACKWARD)
        after(clock, 0.3, recorder.mark, END_BACKWARD_WITH_LOSS, 0.5)
        after(clock, 0.1, recorder.mark, END_UPDATE)
    recorder.mark(BEGIN_DATA)
    after(clock, 0.1, recorder.mark, END_DATA, 8.0)
    recorder.mark(BEGIN_UPDATE)  # and raises: a rank was lost
    one_step(recorder, clock)
    recorder.close(ended=True)
    steps = written(tmp_path).steps
    assert len(steps) == 3
    assert steps[0].update == pytest.approx(0.5)
    assert steps[-1].backward == pytest.approx(0.3)


def test_an_endless_run_fits_into_the_file(tmp_path, recorder, clock):
    for number in range(5000):
        one_step(recorder, clock, data=0.001, forward=0.002, backward=0.003, update=0.004, loss=float(number))
    recorder.close(ended=False)
    file = written(tmp_path)
    assert 512 <= len(file.steps) <= 1024
    assert sum(record.num_steps for record in file.steps) == file.steps_done == 5000
    assert sum(record.samples for record in file.steps) == 40000
    assert sum(record.loss for record in file.steps) == pytest.approx(sum(range(5000)))
    assert sum(record.forward for record in file.steps) == pytest.approx(10, rel=1e-6)
    for before, record in zip(file.steps, file.steps[1:], strict=False):
        assert record.first == before.first + before.num_steps
        assert record.begin == pytest.approx(before.end)
    assert (tmp_path / "0.steps").stat().st_size == FILE_BYTES


def test_all_ranks_keep_the_same_operations_however_many_there_were(tmp_path):
    kept = []
    for number, count in enumerate((20_000, 21_000)):
        file = StepFile(tmp_path / f"{number}.steps", 0.0, 0.0)
        for seq in range(1, count + 1):
            file.add_operation(array("d", (0, 3, seq, 4, seq, seq + 1, 3, seq, 0)), seq)
        file.close()
        kept.append({int(op.seq) for op in read_folder(tmp_path)[number].operations})
    common = kept[0] & kept[1]
    assert len(common) > 1000
    assert all((seq // WINDOW) % 8 == 0 for seq in common)
    assert len(kept[0]) <= 4096


def test_a_rank_that_is_killed_at_any_moment_leaves_what_it_has_done(tmp_path, recorder, clock):
    draw = random.Random(1)
    for number in range(1, 1500):
        one_step(recorder, clock)
        if draw.random() < 0.02:
            data = (tmp_path / "0.steps").read_bytes()  # as whoever looks after a kill finds it
            file = read_rank_file(data)
            assert number - 1 - 2 <= sum(record.num_steps for record in file.steps) + 2
            assert file.steps_done == number - 1  # the last one ends with the next batch
            assert not file.ended
    recorder.mark(BEGIN_DATA)
    assert written(tmp_path).phase == "data"


@pytest.mark.parametrize("seed", range(8))
def test_what_a_killed_rank_had_not_made_into_records_is_read_as_it_would_have_made_it(tmp_path, monkeypatch, seed):
    """Events are made into records many at a time, in the rank or, after its death, by whoever reads its file: the same
    ones, for any loop, wherever the two take over from each other.
    """
    draw = random.Random(seed)
    clocks = Clock(), Clock()
    (tmp_path / "at once").mkdir()
    (tmp_path / "late").mkdir()
    at_once = StepRecorder(str(tmp_path / "at once/0.steps"), {"rank": 3}, clocks[0])
    late = StepRecorder(str(tmp_path / "late/0.steps"), {"rank": 3}, clocks[1])
    monkeypatch.setattr(at_once, "_limit", lambda: 1)
    for recorder in (at_once, late):  # or the two look at the process at different moments
        monkeypatch.setattr(recorder, "_measure_process", lambda now: None)
    num_events = 0
    while num_events < 1500:
        for kind, value in [draw.choice(EVENTS)] if draw.random() < 0.1 else LOOP:
            num_events += 1
            seconds = draw.choice((0.001, 0.01))
            for recorder, clock in zip((at_once, late), clocks, strict=True):
                clock.now += seconds
                recorder.mark(kind, value)
        if draw.random() < 0.02:
            left = [read_folder(tmp_path / name)[0] for name in ("at once", "late")]
            for name in FIELDS:
                assert getattr(left[0], name) == getattr(left[1], name), name
    for recorder in (at_once, late):
        recorder.close(ended=False)


def test_a_rank_that_dies_between_its_records_and_its_state_has_done_no_step_twice(
    tmp_path, recorder, clock, monkeypatch
):
    for _ in range(3):
        one_step(recorder, clock)
    monkeypatch.setattr(recorder, "_save_state", lambda: None)  # from here on it is dead before
    clock.now += 100
    for _ in range(3):
        one_step(recorder, clock)
    read = written(tmp_path)
    assert [step.first for step in read.steps] == [1, 2, 3, 4, 5]
    assert read.steps_done == 5


def test_only_the_thread_of_the_loop_is_listened_to(tmp_path, recorder, clock):
    one_step(recorder, clock)
    thread = threading.Thread(target=one_step, args=(recorder, clock))
    thread.start()
    thread.join()
    recorder.close(ended=True)
    recorder.mark(BEGIN_DATA)  # and afterwards nobody is
    assert written(tmp_path).steps_done == 1


def test_a_loop_without_a_loader_goes_on_after_an_optimizer_that_raised(tmp_path, recorder, clock):
    """The update that had not ended stayed open, and all that came later was inside of it: no step was seen again."""
    for number in range(4):
        after(clock, 0.2, recorder.mark, BEGIN_BACKWARD)
        after(clock, 0.3, recorder.mark, END_BACKWARD_WITH_LOSS, 0.5)
        after(clock, 0.1, recorder.mark, BEGIN_UPDATE, 7)
        if number != 1:  # a rank was lost
            after(clock, 0.1, recorder.mark, END_UPDATE)
    recorder.close(ended=True)
    assert written(tmp_path).steps_done == 3


def test_what_goes_wrong_in_recording_is_said_and_ends_no_program(tmp_path, recorder, clock, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "_save_state", lambda: 1 / 0)
    one_step(recorder, clock)
    one_step(recorder, clock)
    assert capsys.readouterr().err.count("report will be incomplete: ZeroDivisionError") == 1
    monkeypatch.undo()


def test_a_wrong_event_is_refused(recorder):
    with pytest.raises(TypeError, match="mark"):
        recorder.log.mark()
    with pytest.raises(TypeError):
        recorder.log.mark("begin")


def test_what_is_no_such_file_is_not_read(tmp_path):
    assert read_rank_file(b"") is None
    assert read_rank_file(bytes(FILE_BYTES)) is None
    StepFile(tmp_path / "a.steps", 0.0, 0.0).close()
    data = bytearray((tmp_path / "a.steps").read_bytes())
    draw = random.Random(4)
    for _ in range(300):  # what a wild store, or a disk, may do to it
        broken = bytearray(data)
        for _ in range(20):
            broken[draw.randrange(8, 2000)] = draw.randrange(256)
        try:
            read_rank_file(bytes(broken))
        except (ValueError, OverflowError) as error:
            pytest.fail(f"{error!r}")


def test_facts_that_do_not_fit_are_left_out(tmp_path):
    file = StepFile(tmp_path / "a.steps", 0.0, 0.0)
    file.set_facts({"rank": 1, "long": "x" * 20000})
    file.add_step(array("d", StepRecord(*[1.0] * 20)))
    file.close()
    (read,) = read_folder(tmp_path)
    assert read.facts == {"rank": 1}


def test_steps_have_the_runs_numbers_where_a_state_commits_them(tmp_path, clock, monkeypatch):
    """Each process called its first step 1, also one that took the place of a lost one or resumed; and a rank that got
    another number when others were lost kept its old one in the records.
    """
    page = progress_page.ProgressPage(bytearray(progress_page.PAGE_BYTES))
    monkeypatch.setattr(progress_page, "_own", page)
    recorder = StepRecorder(str(tmp_path / "0.steps"), {"rank": 3}, clock)
    for step in (60, 61, 62):
        one_step(recorder, clock)
        page.commit(min(step, 61))
    recorder.rank_now = lambda: 2
    page.set_generation(1)  # a rank is lost: step 62 is done again
    for step in (62, 63):
        one_step(recorder, clock, loss=float("nan") if step == 62 else 1.0)
        page.commit(step)
    recorder.close(ended=True)
    read = written(tmp_path)
    assert [(step.first, step.rank) for step in read.steps] == [(60, 3), (61, 3), (62, 3), (62, 2), (63, 2)]
    assert (read.steps_done, read.reached, read.first_broken, read.last_finite) == (5, 63, 62, 63)


def test_of_too_many_groups_the_first_are_kept(tmp_path):
    """The list of groups was the last fact, and dropped whole when it had no room: no collective could be told."""
    groups = [{"name": f"group {i}", "generation": 0, "again": 0} for i in range(500)]
    file = StepFile(tmp_path / "a.steps", 0.0, 0.0)
    file.set_facts({"rank": 1, "cpus": [0, 1], "groups": groups})
    file.close()
    (read,) = read_folder(tmp_path)
    assert (read.facts["rank"], read.facts["cpus"]) == (1, [0, 1])
    assert read.facts["groups"] == groups[: len(read.facts["groups"])]
    assert len(read.facts["groups"]) > 50
