"""A script does not come to the same `elastic.run`s each time: the program is `elastic_other_runs.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system import elastic_other_runs
from tests.system.phalanx_command import Finished, run, said_by


def start(folder: Path, what: str, strike: str = "") -> Finished:
    """The program on two ranks of this host."""
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strike}
    finished = run("--nproc-per-node", "2", elastic_other_runs.__file__, str(folder), what, env=env)
    assert (folder / "struck").exists() == bool(strike)
    return finished


_TRAIN = "train(model=DistributedDataParallel, optimizer=SGD)"
_TUNE = "tune(model=DistributedDataParallel, optimizer=SGD)"


@pytest.mark.parametrize(
    ("what", "strike", "come", "begun"),
    [
        ("leaves out", "tune", _TUNE, f"{_TRAIN}, then {_TUNE}"),
        pytest.param("goes ahead", "train", _TUNE, _TRAIN, marks=pytest.mark.slow),
        pytest.param("caught", "tune", _TRAIN, _TUNE, marks=pytest.mark.slow),
    ],
)
def test_a_replacement_that_comes_to_other_runs_ends_the_job_at_once(
    what: str, strike: str, come: str, begun: str, tmp_path: Path
) -> None:
    """A run was left out, or one that had failed was passed over as if it were another, and the job went on."""
    finished = start(tmp_path, what, strike)
    said = finished.out + finished.err
    assert finished.code == 75, said
    assert f"the script of rank 1 has come to {come}, and that of rank 0 has come to {begun}" in said
    assert "all done" not in finished.out
    assert said.count("is lost: ") == 1


@pytest.mark.slow
def test_runs_of_one_name_are_told_to_be_not_recoverable_once_and_nothing_is_kept_of_them(tmp_path: Path) -> None:
    """Which of them a replacement was in could not be told, and what each had left was kept to the end of the job."""
    finished = start(tmp_path, "quiet")
    assert finished.code == 0, finished.err
    told = [line for line in finished.lines + finished.err.splitlines() if "is elastic.run a second time" in line]
    assert len(told) == 1
    assert said_by(told[0]) == {0, 1}
    assert "a rank that is lost from here on ends the job" in told[0]
    kept = [line.split()[-1] for line in finished.out.splitlines() if "kept" in line for _ in said_by(line)]
    assert kept == ["1", "1", "0", "0", "0", "0"]


@pytest.mark.slow
def test_a_loss_in_a_run_whose_name_has_come_before_ends_the_job(tmp_path: Path) -> None:
    finished = start(tmp_path, "loop", "train 1")
    assert finished.code != 0
    assert "First failure: rank 1 of 2" in finished.err
    assert not (tmp_path / "train 2").exists()
