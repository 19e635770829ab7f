"""Whom a rank that gives up waiting names: ranks 0 and 1 are on its host, 2 and 3 on another one."""

from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.transport.hierarchical.failure_reports import decide_missing

HERE = RankPosition(4, "all_reduce #4", inside=True)
BEFORE = RankPosition(3, "broadcast #3")


def missing_for(rank: int, answers: dict[int, RankPosition], late_here: tuple[int, ...] = ()) -> list[int]:
    """For `rank`, which is in the fourth collective."""
    return decide_missing([r for r in range(4) if r != rank], answers, 4, late_here, leader=0)


def test_a_rank_that_waits_for_a_host_that_is_cut_off_is_not_named_by_its_neighbour():
    """Each rank has a connection of its own to the other host: rank 0 had its part, and waited in memory for rank 1,
    which had none. Rank 0 named it beside those of the host that was cut off, though it was in the same collective.
    """
    assert missing_for(0, {1: HERE}, late_here=(1,)) == [2, 3]
    assert missing_for(1, {0: HERE}, late_here=(0,)) == [2, 3]


def test_whoever_does_not_answer_or_has_not_come_is_named():
    assert missing_for(0, {1: BEFORE, 2: HERE, 3: HERE}, late_here=(1,)) == [1]
    assert missing_for(0, {2: HERE, 3: BEFORE}) == [1, 3]
    assert missing_for(0, {}, late_here=(1,)) == [1, 2, 3]


def test_where_all_have_come_the_one_that_is_behind_here_is_named():
    assert missing_for(0, {1: HERE, 2: HERE, 3: HERE}, late_here=(1,)) == [1]
    assert missing_for(1, {0: HERE, 2: HERE, 3: HERE}, late_here=(0,)) == []  # their leader: it waits for the others
