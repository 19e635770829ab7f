"""The state of a job whose model is in stages: how it loads, and what `elastic.run` refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import elastic
from phalanx.elastic.objects import Objects
from phalanx.testing import run_ranks


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

    with pytest.raises(TypeError, match="'model' contains a Pipeline; pass the Pipeline itself to State"):
        elastic.State(model=nn.Sequential(Hidden()))


def test_a_job_that_may_lose_ranks_refuses_stages_by_name() -> None:
    class Empty(phalanx.Pipeline):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(
        ValueError, match=r"'model' is a Pipeline\. Only one rank has the state of a stage.*--max-restarts"
    ):
        Objects({"model": Empty()}).refuse_unsupported(2)
