"""Which runs of the script each rank has come to, from what the ranks tell of themselves."""

from __future__ import annotations

import pytest

from phalanx.elastic.resume_point import RankState, decide, describe_differing, describe_other_runs


def rank(*runs: str, number: int = 5, form: str = "") -> RankState:
    """A rank whose script has come to these runs; `number` is -1 for one that was just started."""
    return RankState(number, is_whole=True, has_stepped=False, was_rank=0, form=form, runs=runs)


def test_a_replacement_comes_to_the_first_runs_of_the_others_one_after_the_other() -> None:
    others = rank("train", "check", "tune")
    for number in (1, 2, 3):
        assert describe_other_runs([others, rank(*others.runs[:number], number=-1)]) == ""


@pytest.mark.parametrize(
    ("begun", "come"),
    [
        ("train, tune", "tune"),  # it has left out one
        ("train, check, tune", "train, tune"),
        ("train", "sample"),
        ("train", "train, tune"),  # it is ahead
        ("train, tune", "sample"),
        ("train, tune", "tune, train"),
    ],
)
def test_a_replacement_that_comes_to_other_runs_is_told_with_the_runs_of_both(begun: str, come: str) -> None:
    standings = [rank(*begun.split(", ")), rank(*come.split(", "), number=-1)]
    come, begun = come.replace(", ", ", then "), begun.replace(", ", ", then ")
    said = f"the script of rank 1 has come to {come}, and that of rank 0 has come to {begun}"
    assert describe_other_runs(standings) == said


def test_ranks_that_train_must_have_begun_the_same_runs() -> None:
    assert describe_other_runs([rank("train", "tune"), rank("train", "tune")]) == ""
    assert describe_other_runs([rank("train", "tune"), rank("train")]) != ""
    assert describe_other_runs([rank("train", "tune"), rank("tune")]) != ""


def test_ranks_in_one_run_must_train_the_same_and_ranks_in_several_need_not() -> None:
    assert describe_differing([rank("train", form="a"), rank("train", number=-1, form="b")]) != ""
    assert describe_differing([rank("train", "tune", form="a"), rank("train", number=-1, form="b")]) == ""


def stepped(num_updates: int, *, is_committing: bool = False) -> RankState:
    """A rank that has updated, and can't take it back."""
    return RankState(5, is_whole=False, has_stepped=True, was_rank=0, progress=(num_updates, is_committing))


def test_ranks_that_have_made_several_updates_go_on_from_the_one_that_has_made_most() -> None:
    """Each of them kept its own, and the replicas went on with different weights."""
    point = decide([stepped(1), RankState(-1, is_whole=False, has_stepped=True, was_rank=-1), stepped(2), stepped(2)])
    assert point is not None
    assert (point.number, point.source, point.receivers, point.is_ahead) == (6, 2, (0, 1, 3), True)


def test_ranks_that_have_come_to_the_commit_have_done_all_of_the_step() -> None:
    point = decide([stepped(1), stepped(1, is_committing=True), stepped(1, is_committing=True)])
    assert point is not None
    assert (point.source, point.receivers) == (1, (0,))
