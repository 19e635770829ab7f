"""What the kept records of collectives say of all of them, against the numbers that they were drawn from."""

import random

import pytest

from phalanx._base.core_numbers import ALL_REDUCE, GRADIENTS
from phalanx._comm.diagnostics.step_records import OperationRecord
from phalanx._job.report.matching import ProcessSample, match


def sampled(rank, kept, num_steps):
    operations = [OperationRecord(0, ALL_REDUCE, seq, 4, seq * 1000, seq * 1000 + 500, 0, 0, 0) for seq in kept]
    return ProcessSample(rank, [("default", 0, 0)], operations, warm_ns=0.0, end_ns=float("inf"), num_steps=num_steps)


@pytest.mark.parametrize("seed", range(20))
def test_calls_without_steps_are_all_counted(seed):
    """Of 900 calls in a run without steps 128 were counted: those that the flight recorder still had."""
    draw = random.Random(seed)
    count = draw.randint(1, 2000)
    kept = range(max(1, count - 127), count + 1)
    (row,) = match([sampled(rank, kept, 0) for rank in range(draw.randint(2, 4))]).collectives
    assert row.count == pytest.approx(count)
    after = draw.randint(0, 100)
    (row,) = match([sampled(rank, [after + seq for seq in kept], 10) for rank in range(2)]).collectives
    assert row.count == pytest.approx(len(kept))


def test_rounds_of_two_reducers_with_the_same_numbers_are_different_rounds():
    """Each reducer counts its rounds. With two wrapped models the first one's round was all waiting, and half
    of the rounds were not counted.
    """

    def process(rank):
        late = 100 * rank
        operations = [
            OperationRecord(0, GRADIENTS, seq, 4, at + late, at + 500, 0, 0, 0)
            for seq in range(1, 11)
            for at in (seq * 2000, seq * 2000 + 1000)
        ]
        return ProcessSample(rank, [("default", 0, 0)], operations, warm_ns=0.0, end_ns=float("inf"), num_steps=10)

    matched = match([process(0), process(1)])
    assert matched.num_matched == 20
    assert matched.collectives[0].count == 20
    assert sum(matched.splits[0].waiting.values()) == pytest.approx(2 * 100e-9)
    (late,) = matched.lateness
    assert (late.rank, late.times, late.lead_s) == (1, 20, pytest.approx(2 * 100e-9))
