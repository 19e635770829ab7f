"""Loops that do more than forward, backward, update, commit: a loss in between costs them no bit either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Numbers, Strike
from tests.elastic.small_agent import SmallAgent
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic


def train_loop(kind: str, job: Job) -> dict[str, Any]:
    """What every rank runs; "late" is a place behind the update, or behind an epoch, of which each kind has another."""
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        model.register_buffer("updates", torch.zeros(()))
        judge = nn.Linear(1, 1)
        torch.manual_seed(100 + dist.get_rank())
        ddp = phalanx.DistributedDataParallel(model, check=False)
        judging = phalanx.DistributedDataParallel(judge, check=False)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        second = torch.optim.SGD(judging.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=job.batch, sampler=sampler)
        things: dict[str, Any] = {"second": second, "judge": judging} if kind == "two optimizers" else {}
        state: Any = elastic.State(
            model=ddp, optimizer=optimizer, scheduler=scheduler, average=average, sampler=sampler, seen=0, **things
        )

        def reduce(value: Tensor) -> None:
            job.strike("late", state.step)
            dist.all_reduce(value.detach().clone())

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(job.epochs):
                for number, (ids, x, y) in enumerate(loader):
                    job.log(state.step, epoch, ids.tolist())
                    if kind == "two optimizers":
                        second.zero_grad()
                        judging(ddp(x).detach()).mean().backward()
                        second.step()
                        job.strike("late", state.step)
                    optimizer.zero_grad()
                    out = ddp(x)
                    loss = (out.squeeze(1) - y).pow(2).mean()
                    (loss + judging(out).mean() if kind == "two optimizers" else loss).backward()
                    optimizer.step()
                    if kind == "a collective behind the update":
                        reduce(loss)
                        scheduler.step()
                        average.update_parameters(model)
                        state.seen += len(ids)
                    elif kind == "several updates to a commit":
                        scheduler.step()
                        if number % 4 != 3:
                            if number % 4 == 1:
                                job.strike("late", state.step)
                            continue
                    elif kind == "a buffer that the loop changes":
                        model.get_buffer("updates").add_(1)
                        job.strike("late", state.step)
                    state.commit()
                    if kind == "validation in the middle" and state.step == 3:
                        ddp.eval()
                        reduce(loss)
                        ddp.train()
                if kind == "a scheduler of epochs, then validation":
                    scheduler.step()
                    reduce(torch.zeros(()))

        train(state)
        models = {"model": ddp, "judge": judge, "average": average}
        weights = {f"{name} {key}": value for name, m in models.items() for key, value in m.state_dict().items()}
        steps = torch.tensor([state.step, state.epoch, state.seen, scheduler.last_epoch])
        return {
            **weights,
            "steps": steps,
            "rate": torch.tensor(optimizer.param_groups[0]["lr"]),
            "random": torch.get_rng_state(),
        }


KINDS = {
    "two optimizers": (Strike(1, "late", 0), Strike(0, "late", 5)),
    "a collective behind the update": (Strike(1, "late", 0), Strike(0, "late", 5)),
    "several updates to a commit": (Strike(0, "late", 1), Strike(1, "late", 3)),
    "a buffer that the loop changes": (Strike(1, "late", 3), Strike(0, "late", 5)),
    "a scheduler of epochs, then validation": (Strike(1, "late", 8), Strike(0, "late", 16)),
    "validation in the middle": (Strike(1, "late", 3),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loop_does_behind_its_update_is_done_once_for_each_step(kind: str, tmp_path: Path) -> None:
    """A step that was past an update when a rank was lost counted as done, although the rest of it was missing.

    So a GAN's second update was, or a scheduler's step, an average of the model, a value; a scheduler that stepped at
    the end of an epoch stepped twice, and an epoch's end counted as a step. A buffer changed behind the update went
    back to what it was before, and a model that was being validated trained on in evaluation mode.
    """

    def run(name: str, strikes: tuple[Strike, ...]) -> tuple[Job, Any]:
        folder = tmp_path / name
        folder.mkdir()
        job = Job(str(folder), strikes)
        return job, SmallAgent(train_loop, 2, kind, job, folder=folder).run()

    _, expected = run("undisturbed", ())
    job, ended = run("disturbed", KINDS[kind])
    assert (expected.generations, ended.generations) == (0, len(job.strikes))
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert [key for key in theirs if not torch.equal(mine[key], theirs[key])] == []
    if kind != "several updates to a commit":  # of which the samples are told by step
        assert [sorted(used) for used in job.samples_of_epochs()] == [list(range(job.samples))] * job.epochs
