"""From which step the ranks continue, and whether they train the same, from what they report of themselves."""

from __future__ import annotations

from phalanx.elastic.group import RankState, decide_resume_point, describe_differing


def test_ranks_that_train_something_else_are_named() -> None:
    first, other = (RankState(5, is_whole=True, has_stepped=False, was_rank=0, form=form) for form in "ab")
    assert describe_differing([first, first]) == ""
    assert describe_differing([first, other]) == "rank 1 has b, rank 0 has a"


def stepped(num_updates: int, *, is_committing: bool = False) -> RankState:
    """A rank that has updated, and can't take it back."""
    return RankState(5, is_whole=False, has_stepped=True, was_rank=0, progress=(num_updates, is_committing))


def test_ranks_that_have_made_several_updates_go_on_from_the_one_that_has_made_most() -> None:
    """Each of them kept its own, and the replicas went on with different weights."""
    point = decide_resume_point(
        [stepped(1), RankState(-1, is_whole=False, has_stepped=True, was_rank=-1), stepped(2), stepped(2)]
    )
    assert point is not None
    assert (point.number, point.source, point.receivers, point.is_ahead) == (6, 2, (0, 1, 3), True)


def test_ranks_that_have_come_to_the_commit_have_done_all_of_the_step() -> None:
    point = decide_resume_point([stepped(1), stepped(1, is_committing=True), stepped(1, is_committing=True)])
    assert point is not None
    assert (point.source, point.receivers) == (1, (0,))
