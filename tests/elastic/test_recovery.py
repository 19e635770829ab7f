"""A rank is lost at every place where it can be; the job ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.jobs import Job, Strike, train_job
from tests.elastic.small_agent import Ended, SmallAgent

from phalanx.elastic import points


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a job gives that nobody disturbs, run once for each kind of job."""
    known: dict[tuple[Job, int], Ended] = {}

    def run_undisturbed(job: Job, world_size: int) -> Ended:
        key = dataclasses.replace(job, folder="", strikes=()), world_size
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            quiet = dataclasses.replace(job, folder=str(folder), strikes=())
            known[key] = SmallAgent(train_job, world_size, quiet, folder=folder).run()
            assert known[key].generations == 0
        return known[key]

    return run_undisturbed


def check(job: Job, world_size: int, folder: Path, undisturbed: Any, losses: int | None = None) -> Ended:
    """The job ends with the bits of an undisturbed run, and has used every sample once in each epoch."""
    job = dataclasses.replace(job, folder=str(folder))
    ended = SmallAgent(train_job, world_size, job, folder=folder).run()
    assert len(list(folder.glob("struck-*"))) == len(job.strikes), "a fault found no occasion"
    if losses is not None:
        assert ended.generations == losses
    expected = undisturbed(job, world_size)
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        different = [key for key in theirs["weights"] if not torch.equal(mine["weights"][key], theirs["weights"][key])]
        assert not different
        assert torch.equal(mine["random"], theirs["random"])
        assert (mine["step"], mine["rate"], mine["scale"]) == (theirs["step"], theirs["rate"], theirs["scale"])
    for used in job.samples_of_epochs():
        assert sorted(used) == list(range(job.samples))
    return ended


PLACES = ["batch", "forward", "backward", "update", "updated", "commit"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_anywhere_in_a_step_costs_no_bit_and_no_sample(
    rank: int, place: str, tmp_path: Path, undisturbed: Any
) -> None:
    check(Job("", (Strike(rank, place, 5),)), 2, tmp_path, undisturbed, losses=1)


@pytest.mark.parametrize("place", ["forward", "finish", "commit"])
def test_the_last_step_the_first_and_the_very_end_are_steps_like_others(
    place: str, tmp_path: Path, undisturbed: Any
) -> None:
    step = {"forward": 0, "finish": 16, "commit": 15}[place]
    check(Job("", (Strike(1, place, step),)), 2, tmp_path, undisturbed, losses=1)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_read_ahead_is_neither_lost_nor_seen_twice(
    persistent: bool, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(1, "backward", 2), Strike(0, "forward", 11))
    check(Job("", strikes, workers=2, persistent=persistent), 2, tmp_path, undisturbed, losses=2)


@pytest.mark.parametrize("point", ["lost", "leave", "meet", "agree", "rebind", "hand over", "restore"])
def test_a_rank_that_is_lost_while_the_others_recover_makes_them_recover_again(
    point: str, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(2, "backward", 5), Strike(1, point, -1))
    check(Job("", strikes, samples=96), 3, tmp_path, undisturbed)


@pytest.mark.parametrize("point", ["meet", "agree", "rebind", "hand over", "restore"])
def test_a_replacement_that_is_lost_before_it_has_the_state_is_replaced(
    point: str, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(1, "backward", 5), Strike(1, point, -1))
    check(Job("", strikes, samples=96), 3, tmp_path, undisturbed, losses=2)


KINDS = {
    "accumulation": Job("", accumulate=2),
    "mixed precision and a scheduler": Job("", amp=True, scheduler=True),
    "PyTorch's wrapper": Job("", wrapper="torch"),
    "a collective after the update": Job("", late_collective=True),
    "momentum, over three ranks": Job("", optimizer="momentum", samples=96),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_goes_on_where_it_was(kind: str, tmp_path: Path, undisturbed: Any) -> None:
    world_size = 3 if "three" in kind else 2
    strikes = (Strike(1, "backward", 3), Strike(0, "commit", 5))
    check(dataclasses.replace(KINDS[kind], strikes=strikes), world_size, tmp_path, undisturbed, losses=2)


@pytest.mark.parametrize("place", ["backward", "update", "updated", "commit", "rebind", "restore"])
def test_an_optimizer_in_shards_loses_the_owner_of_a_slice_and_no_bit(
    place: str, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(0, "backward", 6), Strike(0, place, -1) if place in points.POINTS[1:] else Strike(1, place, 3))
    check(Job("", strikes, optimizer="zero"), 2, tmp_path, undisturbed, losses=2)
