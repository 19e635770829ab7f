"""A rank that has a stage of a pipeline is lost: its stage is had back, or the error says that it is not."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # what a rank needs is imported once, here
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import Ended, SmallAgent
from tests.training import copy_state
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import elastic
from phalanx.elastic import points
from phalanx.pipeline.schedule import plan_schedule
from phalanx.testing import run_ranks

_STEPS = 8


def train_pipeline(
    job: Job,
    schedule: Any = "1f1b",
    balance: Any = "auto",
    mesh: str = "",
    resumes: bool = False,
    keep: str | None = None,
    every: int = 1,
) -> dict[str, Any]:
    """A model with dropout and BatchNorm, trained in stages; ranks draw random numbers of their own, too."""
    with phalanx.init(timeout=60.0):
        rank = dist.get_rank()
        torch.manual_seed(1)
        grid: Any = phalanx.mesh(pipeline=2, data=-1) if mesh else None
        embedding = nn.Linear(6, 16)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(embedding, *layers, nn.Linear(16, 16), nn.Linear(16, 6))
        model[5].weight = layers[0][0].weight  # one parameter in two stages
        if balance == "measured":  # as a replacement may, who measures at another time
            balance = [9, 10] if elastic_generation() else [10, 9]
        pipe = phalanx.Pipeline(
            model,
            micro_batches=4,
            schedule=schedule,
            loss_fn=F.mse_loss,
            balance=balance,
            mesh=grid,
        )
        optimizer: Any = (
            phalanx.ZeroRedundancyOptimizer(
                pipe.parameters(), torch.optim.AdamW, process_group=grid.get_group("data"), lr=0.01
            )
            if mesh == "sharded"
            else torch.optim.AdamW(pipe.parameters(), lr=0.01)
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        state = elastic.State(model=pipe, optimizer=optimizer, scheduler=scheduler, history=[], own=rank)
        optimizer.register_step_pre_hook(lambda *_: job.strike("update", state.step))
        optimizer.register_step_post_hook(lambda *_: job.strike("updated", state.step))
        for module in pipe.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.register_forward_hook(lambda *_: job.strike("forward", state.step))
                module.register_full_backward_hook(lambda *_: job.strike("backward", state.step))
        points.listen(lambda point: job.strike(point, state.step))
        act = pipe._executor._act

        def act_or_die(action: Any, work: Any) -> None:
            job.strike(f"cell {action.kind}{action.stage}.{action.micro_batch}", state.step)
            act(action, work)

        pipe._executor._act = act_or_die  # type: ignore[method-assign]
        add = pipe._tied.add

        def add_or_die() -> None:
            job.strike("tied", state.step)
            add()

        pipe._tied.add = add_or_die  # type: ignore[method-assign]
        stages = pipe.stages_of(pipe.pipeline_rank(rank))
        if resumes:  # as a script does that goes on from a checkpoint, in a replacement, too
            path = Path(job.folder) / "begin.pt"
            if not elastic_generation():
                phalanx.save_checkpoint(path, state.state_dict())
            state.load_state_dict(phalanx.load_checkpoint(path))

        @elastic.run(state, keep=keep)
        def train(state: Any) -> None:
            for _ in state.epochs(2):
                while state.step < _STEPS // 2 * (state.epoch + 1):
                    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(len(state.history)))
                    # Its groups are new ones. In rows of memory: how MKL rounds depends on where strided ones lie.
                    x = x[:10] if grid is None else x.view(-1, grid.size(1), 6)[:, grid.get_local_rank("data")].clone()
                    optimizer.zero_grad()
                    loss = pipe.step(x, target=x)
                    pipe.clip_grad_norm_(1.0)
                    optimizer.step()
                    scheduler.step()
                    state.own = 3 * state.own % 1001 + rank  # a value that differs from rank to rank
                    state.history.append(round(loss.item(), 6))
                    if len(state.history) % every == 0:
                        state.commit()

        with _log_in(Path(job.folder) / f"log-{rank}-{elastic_generation()}"):
            train(state)
        assert stages == pipe.stages_of(pipe.pipeline_rank(dist.get_rank()))
        return {
            "weights": copy_state(pipe),
            "history": list(state.history),
            "own": state.own,
            "random": torch.get_rng_state(),
            "rate": optimizer.param_groups[0]["lr"],
            "optimizer": [] if mesh == "sharded" else _tensors_of(optimizer),
        }


def _tensors_of(optimizer: Any) -> list[torch.Tensor]:
    return [one.clone() for state in optimizer.state_dict()["state"].values() for one in state.values()]


def elastic_generation() -> int:
    """That this process was started for, until it has met the others."""
    from phalanx.backend import rendezvous

    return rendezvous.generation()


@contextlib.contextmanager
def _log_in(path: Path) -> Iterator[None]:
    logger = logging.getLogger("phalanx.elastic.run")
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


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
