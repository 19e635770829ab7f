"""Schedules as data: that they end, how long they take, and that they are those of torch.distributed.pipelining."""

import pytest
from torch.distributed.pipelining import schedules as theirs

from phalanx.pipeline.schedule import SCHEDULES, plan_schedule
from phalanx.pipeline.simulate import ideal_efficiency, simulate, unit_seconds


@pytest.mark.slow(but=("gpipe",))
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_waits_for_itself(name):
    for ranks in range(1, 9):
        for per_rank in range(1, 5) if name == "interleaved" else [1]:
            for micro_batches in range(1, 25):
                schedule = plan_schedule(name, ranks, micro_batches, ranks * per_rank)
                timeline = simulate(schedule, unit_seconds(schedule))
                ran = [span.action for spans in timeline.ranks for span in spans]
                kinds = "FIW" if name == "zero_bubble" else "FB"
                assert len(set(ran)) == len(ran) == ranks * per_rank * micro_batches * len(kinds)
                simulate(plan_schedule(name, ranks, micro_batches, ranks * per_rank, training=False), lambda _: 1.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_papers(name):
    for ranks in range(1, 9):
        for micro_batches in range(ranks, 25):
            schedule = plan_schedule(name, ranks, micro_batches)
            bubble = simulate(schedule, unit_seconds(schedule)).bubble
            assert bubble == pytest.approx(1 - ideal_efficiency(ranks, micro_batches))


def test_interleaving_shortens_the_bubble_and_zero_bubble_nearly_ends_it():
    def bubble(name, **stages):
        schedule = plan_schedule(name, 4, 8, **stages)
        return simulate(schedule, unit_seconds(schedule)).bubble

    assert bubble("interleaved") == pytest.approx(1 - ideal_efficiency(4, 8, 2))
    assert bubble("interleaved", num_stages=16) == pytest.approx(1 - ideal_efficiency(4, 8, 4))
    assert bubble("zero_bubble") < bubble("1f1b") / 2


def test_1f1b_keeps_as_many_micro_batches_in_flight_as_there_are_stages_to_the_end():
    schedule = plan_schedule("1f1b", 4, 8)
    assert [schedule.in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [plan_schedule("gpipe", 4, 8).in_flight(stage) for stage in range(4)] == [8] * 4
    assert max(plan_schedule("zero_bubble", 4, 8).in_flight(stage) for stage in range(4)) == 4


def _their_order(cls, ranks, per_rank, micro_batches):
    """The order of torch's schedules, whose constructors want stages, without one."""
    schedule = cls.__new__(cls)
    schedule._n_microbatches = micro_batches
    schedule._num_stages = schedule.pp_group_size = ranks
    schedule.n_local_stages = per_rank
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    if hasattr(schedule, "_calculate_single_rank_operations"):
        orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        orders = schedule._get_pipeline_order()
    return [[str(a) for a in orders[rank] if a is not None and a.is_compute_op] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "cls", "per_rank"),
    [
        ("gpipe", theirs.ScheduleGPipe, 1),
        ("1f1b", theirs.Schedule1F1B, 1),
        ("interleaved", theirs.ScheduleInterleaved1F1B, 2),
        ("interleaved", theirs.ScheduleInterleaved1F1B, 3),
        ("zero_bubble", theirs.ScheduleInterleavedZeroBubble, 1),
    ],
)
def test_the_orders_are_those_of_torch(name, cls, per_rank):
    for ranks in range(2, 6):
        for micro_batches in (ranks, 2 * ranks, 4 * ranks):
            ours = plan_schedule(name, ranks, micro_batches, ranks * per_rank)
            expected = _their_order(cls, ranks, per_rank, micro_batches)
            mine = [[str(action) for action in order] for order in ours.orders]
            if (
                name == "1f1b"
            ):  # torch's description of its 1F1B has no micro-batch 0 on the last rank; what it runs has
                del mine[-1], expected[-1]
            assert mine == expected


def test_the_last_backward_of_a_stage_is_known_where_backwards_are_in_one_piece():
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        schedule = plan_schedule(name, 2, 5 if per_rank == 1 else 6, 2 * per_rank)
        for stage in range(2 * per_rank):
            order = [a.micro_batch for a in schedule.orders[stage % 2] if a.stage == stage and a.kind == "B"]
            assert schedule.last_backward[stage] == order[-1]
    assert plan_schedule("zero_bubble", 2, 4).last_backward == {}
    assert plan_schedule("1f1b", 2, 4, training=False).last_backward == {}


def test_numbers_that_make_no_schedule_are_refused():
    with pytest.raises(ValueError, match=r"one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble', got 'gpip'"):
        plan_schedule("gpip", 2, 4)
    with pytest.raises(ValueError, match="3 stages cannot be spread over 2 ranks"):
        plan_schedule("1f1b", 2, 4, 3)
    with pytest.raises(ValueError, match="3 stages cannot be spread over 2 ranks"):
        plan_schedule("interleaved", 2, 4, 3)
