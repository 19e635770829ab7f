"""A host is lost whose ranks have stages of a pipeline: the next host has a copy of each stage, and no bit is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.pipelines import train_pipeline
from tests.elastic.small_agent import Ended, SmallAgent

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_KEPT = ("1f1b", "auto", "", False, "neighbour")
_SPARE = 2


def run_on(machines: list[Host], sizes: tuple[int, ...], job: Job, *args: Any) -> Ended:
    """Run the pipeline on hosts of so many ranks."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    return SmallAgent(
        train_pipeline, sum(sizes), job, *args, folder=folder, machines=machines, sizes=sizes, timeout_s=240.0
    ).run()


def check(sizes: tuple[int, ...], strikes: tuple[Strike, ...], folder: Path, *args: Any) -> None:
    """Every weight, loss and random number is that of the job that nobody disturbs."""
    with hosts(len(sizes) + _SPARE) as machines:
        quiet = run_on(machines, sizes, Job(str(folder / "quiet")), *args)
        ended = run_on(machines, sizes, Job(str(folder / "lost"), strikes), *args)
    assert len(list((folder / "lost").glob("struck-*"))) == len(strikes), "a fault found no occasion"
    assert ended.generations >= 1
    assert quiet.generations == 0
    for mine, theirs in zip(ended.results, quiet.results, strict=True):
        assert_equal(mine["weights"], theirs["weights"])
        assert_equal(mine["optimizer"], theirs["optimizer"])
        assert (mine["history"], mine["own"]) == (theirs["history"], theirs["own"])
        assert_equal(mine["random"], theirs["random"])
        assert mine["rate"] == theirs["rate"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "updated", "commit"])
def test_a_host_that_is_lost_takes_no_stage_with_it(place: str, tmp_path: Path) -> None:
    """Its weights were on no other host: the job ended, to start again from a checkpoint."""
    check((1, 1), (Strike(1, place, 5, host=True),), tmp_path, *_KEPT)


@pytest.mark.slow
def test_hosts_are_lost_one_after_the_other_while_stages_are_handed_over_and_with_a_rank(tmp_path: Path) -> None:
    """The one that has the copy of the first is lost as soon as the first is there again, on a spare host."""
    strikes = (
        Strike(0, "updated", 1, host=True),
        Strike(1, "update", 3, host=True),
        Strike(3, "update", 6),
    )
    check((1, 2, 1), strikes, tmp_path, *_KEPT)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "updated", "commit"])
def test_a_lost_host_has_its_stages_back_from_replicas_and_nothing_is_copied_in_a_step(
    place: str, tmp_path: Path
) -> None:
    """The job ended where no neighbour kept a copy. Host 1 has a replica of each stage, and hosts 0 and 2 one each."""
    strikes = (Strike(1, place, 3, host=True), Strike(0, "updated", 6, host=True))
    check((1, 2, 1), strikes, tmp_path, "1f1b", "auto", "replicated")


@pytest.mark.slow
def test_a_stage_whose_replicas_are_on_one_host_is_lost_with_it_and_named(tmp_path: Path) -> None:
    strikes = (Strike(2, "updated", 3, host=True),)
    text = _fails_with(tmp_path, (2, 2), strikes, "1f1b", "auto", "replicated")
    assert "nothing is left of what stage 1 (rank 2) and stage 1 (rank 3) kept of commit" in text


def _fails_with(folder: Path, sizes: tuple[int, ...], strikes: tuple[Strike, ...], *args: Any) -> str:
    with hosts(len(sizes) + _SPARE) as machines, pytest.raises(RuntimeError, match="JobEndedExit: 75"):
        run_on(machines, sizes, Job(str(folder / "lost"), strikes), *args)
    return "\n".join(path.read_text() for path in (folder / "lost").glob("log-*"))


@pytest.mark.slow
def test_without_copies_the_job_says_how_stages_are_kept(tmp_path: Path) -> None:
    text = _fails_with(tmp_path, (1, 1), (Strike(1, "backward", 3, host=True),))
    assert "stage 1 (rank 1) was lost" in text
    assert "only kept with elastic.run(state, keep='neighbour')" in text


def test_a_stage_that_is_lost_together_with_its_copy_is_named(tmp_path: Path) -> None:
    strikes = tuple(Strike(host, "updated", 3, host=True) for host in (0, 1))
    text = _fails_with(tmp_path, (1, 1, 1), strikes, *_KEPT)
    assert "nothing is left of what stage 0 (rank 0) kept of commit" in text
    assert "Start again, with a new Pipeline and the last checkpoint" in text
