"""A rank is lost at every place where it can be; the job ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal, assert_same_on_all_ranks
from tests.elastic.jobs import Job, Strike, train_apart, train_job
from tests.elastic.small_agent import Ended, SmallAgent
from torch import nn

import phalanx
from phalanx import elastic
from phalanx.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a job gives that nobody disturbs, run once for each kind of job."""
    known: dict[tuple[Job, int], Ended] = {}

    def run_undisturbed(job: Job, world_size: int) -> Ended:
        key = dataclasses.replace(job, folder="", strikes=(), resume="", checkpoint=""), world_size
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            quiet = dataclasses.replace(key[0], folder=str(folder))
            known[key] = SmallAgent(train_job, world_size, quiet, folder=folder).run()
            assert known[key].generations == 0
        return known[key]

    return run_undisturbed


def check(job: Job, world_size: int, folder: Path, undisturbed: Any, losses: int | None = None) -> Ended:
    """The job ends with the bits of an undisturbed run, and has used every sample once in each epoch."""
    job = dataclasses.replace(job, folder=str(folder))
    ended = SmallAgent(train_job, world_size, job, folder=folder).run()
    assert len(list(folder.glob("struck-*"))) >= len(job.strikes), "a fault found no occasion"
    if losses is not None:
        assert ended.generations == losses
    expected = undisturbed(job, world_size)
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert_equal(mine["weights"], theirs["weights"])
        assert torch.equal(mine["random"], theirs["random"]) or job.resume
        assert (mine["step"], mine["rate"], mine["scale"]) == (theirs["step"], theirs["rate"], theirs["scale"])
    for used in job.samples_of_epochs():
        assert sorted(used) == list(range(job.samples))
    return ended


PLACES = ["batch", "forward", "backward", "update", "updated", "commit"]


def test_a_rank_that_is_killed_anywhere_in_a_step_costs_no_bit_and_no_sample(tmp_path: Path, undisturbed: Any) -> None:
    """Each rank at each place, in a step of its own."""
    strikes = tuple(Strike(n % 2, PLACES[n // 2], 2 + n) for n in range(2 * len(PLACES)))
    check(Job("", strikes), 2, tmp_path, undisturbed, losses=len(strikes))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_read_ahead_is_neither_lost_nor_seen_twice(
    persistent: bool, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(1, "backward", 2), Strike(0, "forward", 11))
    check(Job("", strikes, workers=2, persistent=persistent), 2, tmp_path, undisturbed, losses=2)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["lost", "leave", "form", "agree", "rebind", "transfer", "restore"])
def test_a_rank_that_is_lost_while_the_others_recover_makes_them_recover_again(
    point: str, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(2, "backward", 5), Strike(1, point, -1))
    check(Job("", strikes, samples=96), 3, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["form", "agree", "rebind", "transfer", "restore"])
def test_a_replacement_that_is_lost_before_it_has_the_state_is_replaced(
    point: str, tmp_path: Path, undisturbed: Any
) -> None:
    strikes = (Strike(1, "backward", 5), Strike(1, point, -1))
    check(Job("", strikes, samples=96), 3, tmp_path, undisturbed, losses=2)


KINDS = {
    "accumulation": Job("", accumulate=2),
    "mixed precision and a scheduler": Job("", amp=True, scheduler=True),
    "PyTorch's wrapper": Job("", wrapper="torch"),
    "momentum, over three ranks": Job("", optimizer="momentum", samples=96),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_goes_on_where_it_was(kind: str, tmp_path: Path, undisturbed: Any) -> None:
    world_size = 3 if "three" in kind else 2
    strikes = (Strike(1, "backward", 3), Strike(0, "commit", 5))
    check(dataclasses.replace(KINDS[kind], strikes=strikes), world_size, tmp_path, undisturbed, losses=2)


@pytest.mark.slow(but=("recovery-zero",))
@pytest.mark.parametrize("optimizer", ["zero", "offload"])
@pytest.mark.parametrize("place", ["update", "updated", "done", "recovery"])
def test_an_optimizer_in_shards_loses_the_owner_of_a_slice_and_no_bit(
    place: str, optimizer: str, tmp_path: Path, undisturbed: Any
) -> None:
    others = (Strike(1, place, 3), Strike(1, "commit", 8))
    if place == "recovery":
        others = (Strike(0, "rebind", -1), Strike(0, "restore", -1))
    check(Job("", (Strike(0, "backward", 6), *others), optimizer=optimizer), 2, tmp_path, undisturbed, losses=3)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["", "lost", "leave", "form", "agree", "rebind", "transfer", "restore"])
def test_an_update_in_shards_that_all_have_made_is_taken_back_where_none_has_committed_it(
    point: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A rank was lost when all had made their parts of the update: the step counted, though on the survivors the loop
    had not come to what it does behind the update, so that a plain value that it counts there missed that step.
    """
    again = (Strike(2, point, -1),) if point else ()
    check(Job("", (Strike(1, "done", 5), *again), optimizer="zero", samples=96), 3, tmp_path, undisturbed)


@pytest.mark.slow
def test_with_fewer_ranks_the_rest_of_the_epoch_is_shared_among_those_who_are_there(tmp_path: Path) -> None:
    job = Job(str(tmp_path), (Strike(1, "backward", 3),), samples=96, epochs=3, workers=2)
    ended = SmallAgent(train_job, 3, job, folder=tmp_path, replace=False).run()
    assert [sorted(used) for used in job.samples_of_epochs()] == [list(range(96))] * 3
    first, second = ended.results
    assert all(
        torch.equal(first["weights"][key], second["weights"][key]) for key in ("module.0.weight", "module.4.bias")
    )
    assert first["step"] == 3 + (96 - 36) // 8 + 1 + 2 * 12  # 60 samples are left, in 7 steps of 8 and one of 4


@pytest.mark.slow
def test_ranks_that_come_are_taken_in_at_a_step_and_get_their_share(tmp_path: Path) -> None:
    job = Job(str(tmp_path), samples=240, epochs=3, optimizer="zero")
    lines: list[int] = []

    def welcome_another(agent: SmallAgent) -> None:
        """Once the first steps are done: two ranks more, one after the other has come in."""
        lines[:] = [sum(path.read_text().count("\n") for path in tmp_path.glob("samples-*"))]
        if (agent.generation, len(agent.slots)) == (0, 2) and lines[0] > 8:
            agent.regroup(add=1)

    ended = SmallAgent(train_job, 2, job, folder=tmp_path, on_turn=welcome_another).run()
    assert ended.generations == 1
    assert len(ended.results) == 3
    for used in job.samples_of_epochs():
        assert set(used) == set(range(240))
        assert len(used) in (240, 241, 242)  # the sampler pads what is left of an epoch to equal shares, as ever
    for other in ended.results[1:]:
        weights = ended.results[0]["weights"]
        assert all(torch.equal(weights[key], other["weights"][key]) for key in ("module.0.weight", "module.4.bias"))


@pytest.mark.slow(but=("DiLoCo",))
@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_an_island_that_is_lost_misses_a_round(kind: str, tmp_path: Path) -> None:
    """The others hold it when they hear of the loss; a replacement has their model from then on."""
    job = Job(str(tmp_path), (Strike(1, "batch", 6), Strike(0, "commit", 13)), samples=128)
    ended = SmallAgent(train_apart, 3, job, kind, folder=tmp_path).run()
    assert ended.generations == 2
    assert len({one["step"] for one in ended.results}) == 1
    weights = [one["weights"] for one in ended.results]
    assert_same_on_all_ranks(weights)
    assert all(torch.isfinite(value).all() for value in weights[0].values())


@pytest.mark.slow(but=("adam",))
@pytest.mark.parametrize("optimizer", ["adam", "zero"])
def test_with_too_few_ranks_the_state_is_saved_and_another_job_goes_on(
    optimizer: str, tmp_path: Path, undisturbed: Any
) -> None:
    saved = tmp_path / "last.pt"
    # another run has left this there: its higher step was taken for a later one of this run, and nothing was saved
    save_checkpoint(saved, {"values": {"step": 1000}})
    job = Job("", (Strike(1, "backward", 5),), draws=False, optimizer=optimizer, checkpoint=str(saved))
    first = tmp_path / "first"
    first.mkdir()
    job = dataclasses.replace(job, folder=str(first))
    agent = SmallAgent(train_job, 2, job, folder=first, end_on_loss=True)
    agent.run()
    assert len(agent.ends) == 2
    assert "JobEndedExit: 75" in agent.ends[1]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["last.pt"]
    assert load_checkpoint(saved)["values"]["step"] == 5
    again = dataclasses.replace(job, strikes=(), checkpoint="", resume=str(saved))
    check(again, 2, tmp_path / "first", undisturbed)


def _train_something_else_where_it_is_new() -> str:
    rank = phalanx.init().rank
    is_new = "PHALANX_GENERATION" in os.environ
    model = nn.Linear(2, 1)
    optimizer = (torch.optim.SGD if is_new else torch.optim.Adam)(model.parameters(), lr=0.1)

    def train(state: elastic.State) -> None:
        if rank == 1 and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    state = elastic.State(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"rank 1 has train\(.*optimizer=SGD\), rank 0 has train\(.*optimizer=Adam\)"):
        elastic.run(state)(train)(state)
    return "told"


def test_who_comes_and_trains_something_else_is_named_on_all_ranks(tmp_path: Path) -> None:
    """Under strategy="auto" hosts took different strategies, and the job ended without a word of that."""
    ended = SmallAgent(_train_something_else_where_it_is_new, 2, folder=tmp_path).run()
    assert ended.results == ["told", "told"]
