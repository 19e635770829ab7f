"""A script calls `elastic.run` twice, and ranks and hosts are lost in either: the program is `elastic_two_runs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.system import elastic_two_runs
from tests.system.phalanx_command import Finished, run
from tests.system.test_run_elastic_first_host import address_of, await_standbys, find_leader
from tests.system.test_run_elastic_hosts import Cluster
from torch import Tensor

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def start(folder: Path, strikes: str = "", **env: str) -> Finished:
    """The program on two ranks of this host."""
    folder.mkdir()
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strikes, **env}
    finished = run("--nproc-per-node", "2", elastic_two_runs.__file__, str(folder), env=env)
    assert all((folder / f"struck {strike}").exists() for strike in strikes.split(",") if strike)
    return finished


def ends_of(folder: Path, num_ranks: int = 2) -> list[tuple[Any, str]]:
    """What each rank has at the end: all weights and states, and what its first run has returned."""
    return [(torch.load(folder / f"end-{rank}.pt"), (folder / f"best-{rank}").read_text()) for rank in range(num_ranks)]


def commits_of(folder: Path) -> list[str]:
    return sorted(line for path in folder.glob("steps-*") for line in path.read_text().splitlines())


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies in which nobody is lost."""
    folder = tmp_path_factory.mktemp("quiet") / "job"
    finished = start(folder)
    assert finished.code == 0, finished.err
    return folder


def expect_same(quiet: Path, folder: Path, finished: Finished, num_ranks: int = 2) -> None:
    assert finished.code == 0, finished.out + finished.err
    assert are_same(ends_of(quiet, num_ranks), ends_of(folder, num_ranks))
    assert commits_of(folder) == commits_of(quiet)


@pytest.mark.parametrize(
    "strikes",
    [
        "second 3 1",
        pytest.param("first 3 1", marks=pytest.mark.slow),
        pytest.param("second 0 0", marks=pytest.mark.slow),
        pytest.param("first 1 0,second 2 0", marks=pytest.mark.slow),
        pytest.param("second 1 1,second 3 0", marks=pytest.mark.slow),  # the first run is known of a replacement then
    ],
)
def test_a_rank_that_is_lost_in_either_run_is_replaced_and_all_bits_are_those_of_an_undisturbed_job(
    strikes: str, quiet: Path, tmp_path: Path
) -> None:
    """A loss in the second run ended the job."""
    finished = start(tmp_path / "job", strikes)
    expect_same(quiet, tmp_path / "job", finished)


@pytest.mark.slow
def test_a_rank_that_is_lost_between_the_runs_ends_the_job_and_the_first_failure_names_it(tmp_path: Path) -> None:
    finished = start(tmp_path / "job", "between 0 1")
    assert finished.code == 137
    assert "First failure: rank 1 of 2" in finished.err
    assert not list((tmp_path / "job").glob("end-*"))


@pytest.mark.slow
def test_what_cannot_be_pickled_is_told_by_the_rank_that_would_need_it(tmp_path: Path) -> None:
    finished = start(tmp_path / "job", "second 3 1", UNPICKLED="1")
    assert finished.code == 1
    assert (
        "TypeError: phalanx.elastic: main.<locals>.pretrain.<locals>.train(model=DistributedDataParallel"
        in finished.err
    )
    assert "has returned what cannot be pickled" in finished.err


def on_hosts(machines: list[Host], folder: Path, strike: str = "", lost: int = 0) -> Finished:
    """The program on three hosts with a rank each; one is killed at a step, and another one joins in its place."""
    folder.mkdir()
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strike, "HOSTS": "1"}
    made = Cluster(machines, folder, "3", env, ())
    try:
        for number in range(3):
            made.start(number, 1, elastic_two_runs.__file__)
            if number:
                made.wait_connected(number)  # they have their ranks in the order in which they come
        leader = 0
        if strike:
            await_standbys(made, 0)
            made.wait_for(0, "is lost here")
            made.kill(lost)
            leader = find_leader(made, 1, 2) if lost == 0 else 0
            if lost == 0:
                made.join(3, address_of(made.jobs[leader]))
            else:
                made.start(3, 1, elastic_two_runs.__file__)
        numbers = [leader, *({0, 1, 2, 3} - {leader, lost if strike else 3})]
        ends = made.ended(*numbers)
        assert [end.code for end in ends] == [0, 0, 0], "\n".join(end.out for end in ends)
        return ends[0]
    finally:
        made.close()


@needs_hosts
@pytest.mark.slow
def test_the_first_host_or_another_one_is_lost_in_the_second_run_and_no_bit_is(tmp_path: Path) -> None:
    with hosts(4) as machines:
        on_hosts(machines, tmp_path / "quiet")
        for lost in (0, 2):
            folder = tmp_path / f"lost {lost}"
            finished = on_hosts(machines, folder, f"second 3 {lost}", lost)
            expect_same(tmp_path / "quiet", folder, finished, num_ranks=3)
