"""A pipeline in an elastic job, which every rank trains."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # what a rank needs is imported once, here
from tests.elastic.jobs import Job
from tests.training import copy_state
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import elastic
from phalanx.elastic import points

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
    from phalanx._comm.backend import rendezvous

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
