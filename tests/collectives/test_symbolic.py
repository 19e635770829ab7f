"""Every schedule is proved, and the proof refuses every way of being wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx._comm.schedules import halving_doubling, hierarchical, ring, tree
from phalanx._comm.schedules.schedule import Operation, SchedulePhase
from phalanx._comm.schedules.symbolic import trace
from phalanx.collectives import Schedule, Topology, Transfer, check

from .conftest import UNEQUAL, every_schedule


def by_hand(
    *steps: Sequence[Transfer], world_size: int, operation: Operation = "all_reduce", num_chunks: int = 1
) -> Schedule:
    """A schedule written out; receives are combined in the order listed."""
    phase = SchedulePhase(
        name="by hand",
        num_steps=len(steps),
        sends=lambda step, rank: [t for t in steps[step] if t.src == rank],
        sources=lambda step, rank: list(dict.fromkeys(t.src for t in steps[step] if t.dst == rank)),
        senders=lambda step: sorted({t.src for t in steps[step]}),
    )
    return Schedule("own", operation, world_size, num_chunks, (phase,), "as written")


def test_every_schedule_keeps_its_promise() -> None:
    proved = 0
    for schedule in every_schedule(range(1, 14)):
        check(schedule)
        proved += 1
    assert proved > 300


@pytest.mark.parametrize("sizes", UNEQUAL)
@pytest.mark.parametrize("across", [ring.all_reduce, tree.all_reduce, halving_doubling.all_reduce])
def test_the_hierarchy_keeps_its_promise_with_any_algorithm_between_hosts(
    sizes: tuple[int, ...], across: object
) -> None:
    assert callable(across)
    check(hierarchical.all_reduce(Topology.of_sizes(sizes), across(len(sizes))))


def test_the_hierarchy_keeps_its_promise_when_ranks_are_dealt_out_to_hosts() -> None:
    check(hierarchical.all_reduce(Topology(((0, 2, 4), (1, 3))), ring.all_reduce(2)))


def test_the_trace_shows_who_contributed_after_each_step() -> None:
    held = [
        [sorted(value.contributors) for value in snapshot.state[1] if value] for snapshot in trace(ring.all_reduce(3))
    ]
    assert held == [
        [[1], [1], [1]],
        [[1], [1], [0, 1]],
        [[1], [0, 1, 2], [0, 1]],
        [[0, 1, 2], [0, 1, 2], [0, 1]],
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]],
    ]


def reduce(src: int, dst: int, start: int = 0, stop: int = 1) -> Transfer:
    return Transfer(src, dst, start, stop, "reduce")


def copy(src: int, dst: int, start: int = 0, stop: int = 1) -> Transfer:
    return Transfer(src, dst, start, stop, "copy")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        pytest.param(
            by_hand([reduce(0, 1)], world_size=2),
            r"own all_reduce for 2 ranks: rank 0 ends with chunk 0 from ranks \[0\], not \[0, 1\]",
            id="unfinished",
        ),
        pytest.param(
            by_hand([reduce(0, 1)], [reduce(0, 1)], world_size=2),
            r"step 1 \(by hand\): reduce of chunk 0 from rank 0 to rank 1: chunk 0 would count ranks \[0\] twice",
            id="counted twice",
        ),
        pytest.param(
            by_hand([copy(1, 2)], world_size=3, operation="broadcast"),
            "rank 1 does not hold chunk 0",
            id="reads what is not there",
        ),
        pytest.param(
            by_hand([reduce(0, 1)], world_size=2, operation="broadcast"),
            "rank 1 has no chunk 0 to combine with",
            id="combines with what is not there",
        ),
        pytest.param(
            by_hand([copy(0, 1), copy(1, 0)], world_size=2),
            "chunk 0 is overwritten while rank",
            id="overwritten while sent",
        ),
        pytest.param(
            by_hand([copy(0, 2), copy(1, 2)], world_size=3),
            "copy of chunk 0 from rank 0 to rank 2 writes chunk 0 in the same step",
            id="written twice",
        ),
        pytest.param(
            by_hand([reduce(0, 1, 0, 1), reduce(0, 1, 1, 2)], world_size=2, num_chunks=2),
            "2 transfers go from rank 0 to rank 1, but the phase declares 1",
            id="undeclared second message",
        ),
        pytest.param(by_hand([reduce(0, 0)], world_size=2), "must be two different ranks", id="to itself"),
        pytest.param(by_hand([reduce(0, 1, 0, 2)], world_size=2), r"a non-empty part of 0\.\.0", id="no such chunk"),
        pytest.param(
            by_hand([reduce(1, 0), reduce(2, 0), reduce(0, 1), reduce(2, 1), reduce(0, 2), reduce(1, 2)], world_size=3),
            "chunk 0 was combined in 2 different orders, so bits differ",
            id="each rank in its own order",
        ),
    ],
)
def test_a_schedule_that_is_wrong_is_refused_with_the_place_and_the_rule(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(schedule)


def test_a_receiver_that_does_not_know_of_a_transfer_is_found() -> None:
    schedule = by_hand([reduce(0, 1)], [copy(1, 0)], world_size=2)
    deaf = replace(schedule.phases[0], sources=lambda step, rank: ())
    with pytest.raises(ValueError, match="the source and the destination disagree on this transfer"):
        check(replace(schedule, phases=(deaf,)))


def test_a_phase_that_only_claims_to_repeat_itself_is_found() -> None:
    schedule = by_hand([reduce(0, 1)], [copy(1, 0)], world_size=2)
    with pytest.raises(ValueError, match="phase 'by hand' declares that its steps are alike, but they differ"):
        check(replace(schedule, phases=(replace(schedule.phases[0], alike=True),)))


def test_a_swap_and_combine_gives_the_same_bits_on_both_sides() -> None:
    check(by_hand([reduce(0, 1), reduce(1, 0)], world_size=2))
