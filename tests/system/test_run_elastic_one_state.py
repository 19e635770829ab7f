"""Two runs of a script train one State, and ranks are lost in the second: the program is `elastic_one_state.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.system import elastic_one_state
from tests.system.phalanx_command import run
from tests.system.test_run_elastic_two_runs import are_same, commits_of


def start(folder: Path, strikes: str = "") -> None:
    """The program on two ranks of this host."""
    folder.mkdir()
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strikes, "PYTHONPATH": path}
    finished = run("--nproc-per-node", "2", elastic_one_state.__file__, str(folder), env=env)
    assert finished.code == 0, finished.out + finished.err
    assert all((folder / f"struck {strike}").exists() for strike in strikes.split(",") if strike)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies in which nobody is lost."""
    folder = tmp_path_factory.mktemp("quiet") / "job"
    start(folder)
    return folder


@pytest.mark.parametrize(
    "strikes",
    [
        "second 3 1",  # in its first step
        pytest.param("second 3 0", marks=pytest.mark.slow),
        pytest.param("first 2 1,second 4 0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_lost_in_the_second_run_of_one_state_and_no_bit_and_no_sample_is(
    strikes: str, quiet: Path, tmp_path: Path
) -> None:
    """Commits were counted on from the first run, and those of the second one's records from 0; the data went on in the
    middle of the epoch, where it had begun anew."""
    start(tmp_path / "job", strikes)
    for rank in range(2):
        ends = [torch.load(folder / f"end-{rank}.pt") for folder in (quiet, tmp_path / "job")]
        assert are_same(*ends), rank
    assert commits_of(tmp_path / "job") == commits_of(quiet)


@pytest.mark.slow
def test_a_replacement_has_modes_and_frozen_layers_and_saves_nothing_between_the_runs(
    quiet: Path, tmp_path: Path
) -> None:
    """It wrote the checkpoint between the runs again, alone, and that was the latest one."""
    folder = tmp_path / "job"
    start(folder, "second 6 1")
    assert (folder / "between-0-1").read_text() == str(folder / "checkpoints" / "00000001-step-3")
    assert (folder / "between-1-1").read_text() == str(folder / "checkpoints" / "00000002-step-5")
    assert (folder / "modes-1-1").read_text() == (quiet / "modes-0-1").read_text()
    assert are_same(torch.load(quiet / "end-1.pt"), torch.load(folder / "end-1.pt"))
