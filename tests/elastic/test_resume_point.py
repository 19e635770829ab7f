"""In which run of the script each rank is, from what the ranks tell of themselves."""

from __future__ import annotations

from phalanx.elastic.resume_point import RankState, describe_differing, find_runs


def rank(*runs: str, number: int = 5, form: str = "") -> RankState:
    """A rank whose script has come to these runs; `number` is -1 for one that was just started."""
    return RankState(number, is_whole=True, has_stepped=False, was_rank=0, form=form, runs=runs)


def test_a_replacement_is_in_the_first_run_of_that_name_behind_those_that_it_has_passed_over() -> None:
    others = rank("train", "tune", "train", "tune")
    assert find_runs([others, rank("train", number=-1)]) == [3, 0]
    assert find_runs([others, rank("train", "tune", "train", number=-1)]) == [3, 2]
    assert find_runs([others, rank("train", "tune", "train", "tune", number=-1)]) == [3, 3]


def test_a_replacement_that_leaves_out_a_run_is_in_the_one_that_it_comes_to() -> None:
    assert find_runs([rank("train", "tune"), rank("tune", number=-1)]) == [1, 1]
    assert find_runs([rank("train", "check", "tune"), rank("train", "tune", number=-1)]) == [2, 2]


def test_a_run_that_the_others_have_not_begun_is_told() -> None:
    standings = [rank("train", "tune"), rank("sample", number=-1)]
    assert find_runs(standings) == [1, -1]
    assert describe_differing(standings) == "rank 1 has come to sample, the others have begun train, then tune"


def test_ranks_in_one_run_must_train_the_same_and_ranks_in_several_need_not() -> None:
    assert describe_differing([rank("train", form="a"), rank("train", number=-1, form="b")]) != ""
    assert describe_differing([rank("train", "tune", form="a"), rank("train", number=-1, form="b")]) == ""
