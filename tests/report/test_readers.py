"""The trace of a report, read by its own reader's rules."""

import dataclasses
import json
import math
import random

import pytest
from tests.report.pages import Page

from phalanx._base.core_numbers import ALL_REDUCE
from phalanx._comm.diagnostics.step_file import RankFile
from phalanx._comm.diagnostics.step_records import OperationRecord, StepRecord, clamp_times
from phalanx._job.report.findings import find
from phalanx._job.report.gather import combine
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.measurements import Measurements, RunEvent
from phalanx._job.report.page import render
from phalanx._job.report.trace import plan_trace


def rank_file(rank, *, num_steps=40, world_size=2, loss=lambda step: 1 / step, attempt=0, operations=True):
    """Steps of 10 ms, a collective of 1 ms at the end of each backward, to which rank 1 comes last."""
    steps, ops = [], []
    for number in range(1, num_steps + 1):
        begin = 100.0 + number / 100
        steps.append(
            StepRecord(number, 1, begin, begin + 0.01, 0.001, 0.002, 0.002, 0.004, 0.001, 8, loss(number), 1, 0.01,
                       1e8 + number, 1e7, number / 100, number, 0, rank, 0)
        )  # fmt: skip
        enter, leave = begin + 0.007 + 0.0005 * (rank == world_size - 1), begin + 0.008
        ops.append(OperationRecord(0, ALL_REDUCE, number, 4096, enter * 1e9, leave * 1e9, 3, number, 0))
    facts = {"rank": rank, "pid": 1000 + rank, "attempt": attempt, "world_size": world_size, "host": "one",
             "groups": [{"name": "0", "generation": 0, "again": 0}], "cores": 8, "cpus": [rank]}  # fmt: skip
    return RankFile(facts, num_steps, "other", 101.0, True, 0, 123456789, 100.0, 1e9, tuple(steps),
                    tuple(ops) if operations else ())  # fmt: skip


JOB = JobRecord("train.py", "phalanx run train.py", 100.0, 1e9 + 100, 2, ended=102.0, end="well", exit_code=0)


def check_trace(trace):
    """The trace event format, as far as it says what an event must have; bars of one thread lie inside or apart."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    threads = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            )  # fmt: skip
            assert set(event["args"]) & {"name", "sort_index"}
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
            assert event["ts"] >= 0
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for bars in threads.values():
        ends = []
        for begin, end in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, "two bars of a thread overlap"
            ends.append(end)
    return threads


def test_the_trace_names_steps_phases_and_collectives():
    trace = plan_trace(JOB, [rank_file(0), rank_file(1)])
    threads = check_trace(trace)
    assert set(threads) == {(pid, tid) for pid in (1, 2) for tid in (1, 2, 3)}
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step 1", "step 40", "data", "forward", "backward", "update", "all_reduce #7"} <= names


def test_infinities_and_half_a_file_are_no_obstacle():
    files = [rank_file(0, loss=lambda step: math.inf if step > 3 else 1.0), rank_file(1, num_steps=3)]
    check_trace(plan_trace(JOB, files))
    run = combine(JOB, files)
    text = run.to_json()
    json.loads(text, parse_constant=pytest.fail)  # JSON has no infinity: strict readers refused report.json
    assert math.isnan(Measurements.from_json(text).loss[-1][1])


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_goes_back_makes_no_negative_times(seed):
    draw = random.Random(seed)
    files = []
    for file in (rank_file(0), rank_file(1)):
        jump, steps = 0.0, []
        for step in file.steps:
            jump -= draw.choice((0.005, 0.5, 1e4)) if draw.random() < 0.1 else 0.0
            forward = step.forward - 0.01 * (draw.random() < 0.1)
            steps.append(step._replace(begin=step.begin + jump, end=step.end + jump, forward=forward))
        files.append(dataclasses.replace(file, steps=clamp_times(steps)))
    check_trace(plan_trace(JOB, files))
    run = combine(JOB, files)
    assert Page(render(run, find(run))).problems == []
    assert all(value >= 0 for rank in run.ranks for value in (rank.step_s, *rank.parts.values()))
    assert all(value >= 0 for curve in (run.throughput, *(r.step_curve for r in run.ranks)) for _, value in curve)
    assert [step.end for step in clamp_times(rank_file(0).steps)] == [step.end for step in rank_file(0).steps]


def test_a_report_that_is_no_json_is_refused_in_a_sentence():
    """`phalanx report` of a folder with another program's report.json showed what the JSON parser said."""
    for text in ("", "{", "<html>"):
        with pytest.raises(ValueError, match="not the report of a run: it is not JSON, or is truncated"):
            Measurements.from_json(text)


def test_a_report_with_an_end_that_nobody_knows_is_refused():
    """`phalanx report` ended with a KeyError's traceback."""
    text = combine(JOB, [rank_file(0)]).to_json()
    assert Measurements.from_json(text.replace('"end":"well"', '"end":"ended"')).end == "ended"
    with pytest.raises(ValueError, match="the report is damaged: end is 'fine', not one of well, "):
        Measurements.from_json(text.replace('"end":"well"', '"end":"fine"'))


def test_a_loss_beyond_all_bounds_is_drawn_and_written():
    """A diverging loss raised OverflowError where it met a float of four bytes, and where axes subtracted."""
    files = [rank_file(0, loss=lambda step: (-1.0) ** step * 10.0 ** min(308, 8 * step))]
    run = combine(JOB, files)
    assert render(run, find(run))
    positive = combine(JOB, [rank_file(0, loss=lambda step: 1.7 * 10.0 ** min(308, 8 * step))])
    assert render(positive, find(positive))


def test_times_of_a_step_and_who_comes_last_are_what_was_written_down():
    run = combine(JOB, [rank_file(0), rank_file(1)])
    first, second = run.ranks
    assert first.step_s == pytest.approx(0.01)
    assert first.parts["waiting"] == pytest.approx(0.0005, rel=0.01)
    assert first.parts["communication"] == pytest.approx(0.0005, rel=0.01)
    assert second.parts["waiting"] == pytest.approx(0.0, abs=1e-6)
    assert first.parts["backward"] == pytest.approx(0.003, rel=0.01)
    assert sum(first.parts.values()) == pytest.approx(first.step_s)
    ((late, times, lead),) = [(late.rank, late.times, late.lead_s) for late in run.lateness]
    assert (late, times) == (1, run.num_matched)
    assert lead == pytest.approx(0.0005, rel=0.01)
    (row,) = run.collectives
    assert row.num_bytes == 4096
    assert row.bandwidth == pytest.approx(4096 / 0.0005, rel=0.01)
    assert run.samples_per_s == pytest.approx(1600)


def test_what_the_survival_of_a_loss_takes_is_no_part_of_a_step_and_makes_no_straggler():
    """A Trainer's rank 0 was killed and replaced: the newcomer was a straggler for whom "the others wait 234 % of each
    step". The step in which they waited for it counted, and its calls stood for those of ranks that had been there for
    longer.
    """
    groups = [{"name": "0", "generation": 0, "again": 0}, {"name": "0", "generation": 1, "again": 0}]
    survivor, newcomer = rank_file(0), rank_file(1)
    steps, calls = list(survivor.steps), list(survivor.operations)
    for i in range(19, 40):  # step 20 takes a second longer, in which it waits for the newcomer
        steps[i] = steps[i]._replace(begin=steps[i].begin + (i > 19), end=steps[i].end + 1, generation=float(i > 19))
        later = 1e9 * (i > 19)
        calls[i] = calls[i]._replace(group=1, enter_ns=calls[i].enter_ns + later, leave_ns=calls[i].leave_ns + 1e9)
    killed = dataclasses.replace(newcomer, steps=newcomer.steps[:19], operations=newcomer.operations[:19], ended=False)
    moved = [c._replace(enter_ns=c.enter_ns + 1e9, leave_ns=c.leave_ns + 1e9) for c in newcomer.operations[19:]]
    begun = [s._replace(begin=s.begin + 1, end=s.end + 1, generation=1.0) for s in newcomer.steps[19:]]
    files = [
        dataclasses.replace(survivor, steps=tuple(steps), operations=tuple(calls),
                            facts={**survivor.facts, "groups": groups}),
        killed,
        dataclasses.replace(newcomer, steps=tuple(begun), operations=tuple(moved), steps_done=21, reached=40,
                            facts={**newcomer.facts, "groups": groups[1:]}),
    ]  # fmt: skip
    run = combine(JOB, files)
    for rank in run.ranks:
        assert rank.step_s == pytest.approx(0.01)
        assert sum(rank.parts.values()) == pytest.approx(0.01)
    assert run.ranks[0].parts["waiting"] == pytest.approx(0.0005, rel=0.1)
    assert [late.lead_s for late in run.lateness] == pytest.approx([0.0005] * len(run.lateness), rel=0.1)
    assert run.ranks[0].longest_s == pytest.approx(0.01)


def test_what_ranks_sent_is_told_without_a_training_loop_too():
    files = [dataclasses.replace(rank_file(rank), steps=(), steps_done=0) for rank in (0, 1)]
    run = combine(JOB, files)
    assert [(row.name, row.count) for row in run.collectives] == [("all_reduce", 40)]
    assert "No training step was recorded" in find(run)[0].text


def test_every_run_is_read_back_as_it_was_written():
    draw = random.Random(3)
    for _ in range(20):
        files = [
            rank_file(rank, num_steps=draw.randint(0, 30), world_size=3, attempt=draw.randint(0, 1))
            for rank in range(draw.randint(0, 3))
        ]
        events = tuple(
            RunEvent(draw.random(), draw.choice(["loss", "failure"]), "gone", draw.randint(0, 2)) for _ in range(2)
        )
        job = JobRecord("a", "b", 100.0, 1e9 + 100, 3, end=draw.choice(["well", "running"]), events=events)
        run = combine(job, files)
        assert Measurements.from_json(run.to_json()) == Measurements.from_json(
            Measurements.from_json(run.to_json()).to_json()
        )
        check_trace(plan_trace(job, files))


def resumed(rank, first, num_steps, *, attempt=0, knows=True, ended=True, begin=0.0, loss=lambda step: 100.0 - step):
    """A process that began with step `first` of the run, which only its own memory of it knows."""
    file = rank_file(rank, num_steps=num_steps, attempt=attempt, operations=False)
    ahead = first - 1 if knows else 0
    steps = [
        step._replace(first=step.first + ahead, loss=loss(step.first + first - 1), begin=step.begin + begin,
                      end=step.end + begin)
        for step in file.steps
    ]  # fmt: skip
    reached = first - 1 + num_steps if knows else None
    return dataclasses.replace(file, steps=tuple(steps), reached=reached, ended=ended, phase_since=steps[-1].end)


def test_a_restart_goes_on_with_the_loss_where_it_says_that_it_began():
    """Attempts' first steps were all called 1, and their losses averaged: 100 - step, failed at 31 and resumed at 30,
    ended with "last loss 70" at step 30. The newest attempt counts for its steps; one that does not know which these
    are is drawn alone.
    """
    known = combine(JOB, [resumed(rank, 1, 31) for rank in (0, 1)] + [resumed(r, 30, 31, attempt=1) for r in (0, 1)])
    assert known.loss == tuple((step, 100.0 - step) for step in range(1, 61))
    assert (known.steps, known.final_loss) == (60, 40.0)
    assert "Steps and loss are the last attempt's" not in find(known)[0].text
    lost = combine(JOB, [resumed(0, 1, 31), resumed(0, 30, 31, attempt=1, knows=False)])
    assert lost.loss == tuple((step, 100.0 - step - 29) for step in range(1, 32))
    assert lost.final_loss == 40.0
    assert "Steps and loss cover only the last attempt, counted from 1" in find(lost)[0].text
    other = combine(JOB, [resumed(0, 1, 31, loss=lambda step: -1.0), resumed(0, 11, 5, attempt=1)])
    assert [loss for _, loss in other.loss] == [-1.0] * 10 + [100.0 - step for step in range(11, 16)]


def test_a_lost_rank_does_not_set_how_far_the_run_came_and_how_fast_it_is():
    """`steps` was the fewest of any rank, by its longest-lived process: 100 done, rank 1 killed at 59 and replaced, was
    "steps 59"; and a rank that is gone for good counted in the samples per second for ever.
    """
    begin = 0.6
    replaced = [resumed(0, 1, 100), resumed(1, 1, 59, ended=False), resumed(1, 60, 41, begin=begin)]
    run = combine(JOB, replaced)
    assert run.steps == 100
    assert [(rank.rank, rank.reached) for rank in run.last_attempt] == [(0, 100), (1, 100)]
    gone = combine(JOB, [resumed(0, 1, 900), resumed(1, 1, 59, ended=False)])
    assert gone.steps == 900
    assert gone.samples_per_s == pytest.approx(800)
    assert [rank.rank for rank in gone.last_attempt] == [0]
    early = combine(JOB, [resumed(0, 1, 900), resumed(1, 1, 59)])  # has done its part
    assert [rank.rank for rank in early.last_attempt] == [0, 1]
    (first, *_, last) = combine(JOB, [without_samples(file) for file in replaced]).throughput
    assert first[1] == pytest.approx(100, rel=0.05)
    assert last[1] == pytest.approx(100, rel=0.05)


def without_samples(file):
    return dataclasses.replace(file, steps=tuple(step._replace(samples=0.0) for step in file.steps))
