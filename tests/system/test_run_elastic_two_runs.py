"""A script calls `elastic.run` twice: the program is `elastic_two_runs.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system import elastic_two_runs
from tests.system.phalanx_command import Finished, run, said_by


def start(folder: Path, strike: str) -> Finished:
    """The program on two ranks of this host."""
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strike}
    finished = run("--nproc-per-node", "2", elastic_two_runs.__file__, str(folder), env=env)
    assert (folder / "struck").exists()
    return finished


@pytest.mark.slow
def test_a_rank_that_is_lost_in_the_first_run_is_replaced_and_the_second_run_follows(tmp_path: Path) -> None:
    finished = start(tmp_path, "first")
    assert finished.code == 0, finished.out + finished.err
    for line in ("first 4", "second 4"):
        assert {rank for text in finished.out.splitlines() if line in text for rank in said_by(text)} == {0, 1}


def test_a_rank_that_is_lost_in_the_second_run_ends_the_job_with_the_advice_to_make_them_one(tmp_path: Path) -> None:
    finished = start(tmp_path, "second")
    said = finished.out + finished.err
    assert finished.code != 0
    assert "First failure: rank 1 of 2" in finished.err
    assert "second is a further elastic.run of this script, and a rank that is lost in it ends the job" in said
    assert "Put the runs into one function" in said
    assert "second 4" not in finished.out
