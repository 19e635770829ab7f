"""A rank that has a stage of a pipeline is lost: its stage is had back, or the error says that it is not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # what a rank needs is imported once, here
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.pipelines import _STEPS, train_pipeline
from tests.elastic.small_agent import Ended, SmallAgent
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import elastic
from phalanx.pipeline.schedule import plan_schedule
from phalanx.testing import run_ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the job gives that nobody disturbs."""
    known: dict[Any, Ended] = {}

    def run(world_size: int, *args: Any) -> Ended:
        if (world_size, args) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[world_size, args] = SmallAgent(
                train_pipeline, world_size, Job(str(folder)), *args, folder=folder
            ).run()
        return known[world_size, args]

    return run


def check(strikes: tuple[Strike, ...], world_size: int, folder: Path, undisturbed: Any, *args: Any) -> None:
    """Every weight, loss, and random number is that of the undisturbed job."""
    job = Job(str(folder), strikes)
    args = args or ("1f1b",)
    ended = SmallAgent(train_pipeline, world_size, job, *args, folder=folder).run()
    assert len(list(folder.glob("struck-*"))) == len(strikes), "a fault found no occasion"
    assert ended.generations >= 1
    expected = undisturbed(world_size, *args)
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert_equal(mine["weights"], theirs["weights"])
        assert mine["history"] == theirs["history"]
        assert len(mine["history"]) == _STEPS
        assert_equal(mine["random"], theirs["random"])
        assert mine["rate"] == theirs["rate"]


@pytest.mark.slow(but=("1-backward",))
@pytest.mark.parametrize("place", ["forward", "backward", "update", "updated", "commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_is_lost_anywhere_in_a_step_costs_no_bit(
    rank: int, place: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Its weights were in no other process: before, a program had to start again from a checkpoint."""
    check((Strike(rank, place, 5),), 2, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "sharded"])
def test_a_replacement_that_loads_a_checkpoint_first_takes_the_stage_that_was_lost(
    mesh: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Alone, before it has met the others."""
    strikes = (Strike(1, "backward", 2), Strike(0, "update", 5))
    check(strikes, 4 if mesh else 2, tmp_path, undisturbed, "1f1b", "auto", mesh, True)


def test_all_who_have_stages_are_lost(tmp_path: Path) -> None:
    """What a stage has left is in the memory of the others; without them the job ends, and says so."""
    text = fails_with(tmp_path, strikes=(Strike(1, "backward", 3), Strike(0, "agree", -1)))
    assert "no rank is left that has what the pipeline's stages were" in text


def draw_cells(schedule: str, world_size: int, kills: int, seed: int) -> tuple[Strike, ...]:
    """Losses in cells of the schedule, of one rank each, in different steps but for the last."""
    draw = random.Random(seed)
    orders = plan_schedule(schedule, world_size, 4).orders  # type: ignore[arg-type]
    steps = sorted(draw.sample(range(_STEPS), kills))
    ranks = [draw.randrange(world_size) for _ in steps]
    actions = [draw.choice(orders[rank]) for rank in ranks]
    cells = [f"cell {action.kind}{action.stage}.{action.micro_batch}" for action in actions]
    return tuple(Strike(rank, cell, step) for rank, cell, step in zip(ranks, cells, steps, strict=True))


def fails_with(folder: Path, *args: Any, replace: bool = True, strikes: tuple[Strike, ...] = ()) -> str:
    """What the ranks that are left say when they end."""
    job = Job(str(folder), strikes or (Strike(1, "backward", 3),))
    agent = SmallAgent(train_pipeline, 2, job, *args, folder=folder, replace=replace)
    with pytest.raises(RuntimeError, match="JobEndedExit: 75"):
        agent.run()
    return "\n".join(path.read_text() for path in folder.glob("log-*"))


def test_a_stage_that_nobody_replaces_is_named(tmp_path: Path) -> None:
    """Two stages cannot be one: no hang, and no half of a model that goes on."""
    text = fails_with(tmp_path, replace=False)
    assert "stage 1 (rank 1) was lost and not replaced: the pipeline's 2 ranks can't go on as 1" in text
    assert "the last checkpoint (phalanx.CheckpointManager)" in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["replicas", "sharded"])
def test_stages_of_pipelines_in_a_mesh_are_lost(mesh: str, tmp_path: Path, undisturbed: Any) -> None:
    """It ended the job. Also both replicas of a stage at once, whose peers map what they have left."""
    strikes = [Strike(3, "forward", 1), Strike(0, "updated", 3), Strike(1, "tied", 4)]
    strikes += [Strike(2, "backward", 6), Strike(3, "update", 6)]
    check(tuple(strikes), 4, tmp_path, undisturbed, "1f1b", "auto", mesh)


def test_a_replacement_that_measures_another_cut_is_told_to_give_numbers(tmp_path: Path) -> None:
    """Its stage has other layers than the one that was lost."""
    text = fails_with(tmp_path, "1f1b", "measured")
    assert "stage 1 (rank 1) was lost, and its replacement has cut the model into [[9, 10]] layers" in text
    assert "the others into [[10, 9]]" in text
    assert "Give balance=" in text


def _small_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _steps(state: Any, step: Any, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        state.optimizer.zero_grad()
        step(x)
        state.optimizer.step()
        state.scheduler.step()
        state.commit()


def _state_of(model: Any, optimizer: Any) -> elastic.State:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return elastic.State(model=model, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.slow
def test_the_state_of_a_job_with_stages_loads_into_another_split_and_where_there_is_none() -> None:
    """That of the optimizer was this rank's stage's: another split, or another rank, took other parameters' moments."""

    def train(rank: int, world_size: int, saved: Any, first: int, last: int) -> Any:
        mesh = phalanx.mesh(pipeline=2, data=2) if world_size == 4 else None
        balance = [1, 4] if mesh is None else [3, 2]
        pipe = phalanx.Pipeline(_small_model(), micro_batches=2, balance=balance, mesh=mesh, loss_fn=F.mse_loss)
        optimizer: Any = (
            torch.optim.AdamW(pipe.parameters(), lr=0.05)
            if mesh is None
            else phalanx.ZeroRedundancyOptimizer(
                pipe.parameters(), torch.optim.AdamW, process_group=mesh.get_group("data"), lr=0.05
            )
        )
        state = _state_of(pipe, optimizer)
        if saved is not None:
            state.load_state_dict(saved)
        _steps(state, lambda x: pipe.step(x, target=x), first, last)
        return state.state_dict()

    model = _small_model()
    plain = _state_of(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    _steps(plain, lambda x: F.mse_loss(model(x), x).backward(), 0, 6)
    by_rank = run_ranks(train, 2, None, 0, 2)
    states = run_ranks(train, 4, by_rank[1], 2, 4)
    for first, last in (by_rank, (states[0], states[3])):
        for read in (lambda state: dict(state["model"]), lambda state: state["optimizer"]["state"]):
            torch.testing.assert_close(read(first["objects"]), read(last["objects"]))
    model = _small_model()
    again = _state_of(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    again.load_state_dict(states[3])
    assert again.step == 4
    _steps(again, lambda x: F.mse_loss(model(x), x).backward(), 4, 6)
    torch.testing.assert_close(again.model.state_dict(), plain.model.state_dict())
    assert again.scheduler.get_last_lr() == plain.scheduler.get_last_lr()


def test_a_pipeline_inside_of_another_module_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over as a model that all ranks share, a stage would have become another one of the same shapes."""

    class Hidden(phalanx.Pipeline):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(TypeError, match="'model' has a Pipeline inside; give State the Pipeline itself"):
        elastic.State(model=nn.Sequential(Hidden()))
