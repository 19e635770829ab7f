"""Ranks lost in a commit of several updates, between which the loop draws, changes values, and validates."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import SmallAgent, run_twice
from tests.logs import logged
from tests.training import copy_state
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import elastic


@dataclass(frozen=True)
class Loop:
    """It says what the loop does in a commit, which tells by State alone where in a commit it is."""

    updates: int = 2  # of a commit
    schedules: str = (
        "update"  # when the scheduler steps: behind each update, before the commit, or behind it ("behind")
    )
    validates: int = 0  # behind the update of each of so many commits; 0 for never
    draws: bool = True
    averages: bool = False
    norm: bool = True
    dropout: float = 0.5
    quiet: int = 0  # so many commits of a single update are before those
    samples: int = 56


def _train(job: Job, loop: Loop) -> dict[str, Any]:
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        rank = dist.get_rank()
        norm = nn.BatchNorm1d(4) if loop.norm else nn.Identity()
        net = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(loop.dropout), nn.Linear(4, 1))
        ddp = phalanx.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
        data = TensorDataset(torch.randn(loop.samples, 4, generator=torch.Generator().manual_seed(5)))
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, 4, sampler=sampler)
        things: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "sampler": sampler}
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2)
        things["scheduler"] = scheduler
        things["generator"] = torch.Generator().manual_seed(7 + rank * loop.draws)
        if loop.averages:
            average = get_ema_multi_avg_fn(0.9)
            things["average"] = AveragedModel(net, multi_avg_fn=average, use_buffers=not loop.norm)
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        np.random.seed(300 + rank)
        state = elastic.State(**things, done=0, total=0.0, own=0.0)

        def strike(place: str) -> None:
            job.strike(f"{place} {state.done}", state.step)

        def validate() -> None:
            ddp.eval()
            with torch.no_grad():
                total = net(torch.randn(3, 4)).sum() + random.random() + np.random.rand()
            strike("validate")
            dist.all_reduce(total)
            state.total += total.item()
            ddp.train()

        net[0].register_forward_hook(lambda *_: strike("forward") if net.training else None)

        @elastic.run(state)
        def train(state: Any) -> None:
            for _ in state.epochs(2 if not loop.quiet else 4):
                for (x,) in loader:
                    strike("batch")
                    is_quiet = state.step < loop.quiet
                    optimizer.zero_grad()
                    loss = ddp(x).square().mean()
                    loss.backward()
                    strike("backward")
                    optimizer.step()
                    strike("updated")
                    if loop.schedules == "update":
                        scheduler.step()
                    if loop.draws and not is_quiet:
                        drawn = torch.rand((), generator=state.generator) + torch.rand(())
                        state.own += drawn.item() + random.random() + np.random.rand()
                    if loop.averages:
                        state.average.update_parameters(net)
                    strike("drawn")
                    if loop.validates and not is_quiet and state.step % loop.validates == loop.validates - 1:
                        validate()
                        strike("validated")
                    state.done += 1
                    if state.done >= loop.updates or is_quiet:
                        state.done = 0
                        if loop.schedules == "commit":
                            scheduler.step()
                        strike("commit")
                        state.commit()
                        if loop.schedules == "behind":
                            scheduler.step()

        train(state)
        return {
            "weights": copy_state(ddp),
            "average": copy_state(state.average) if loop.averages else {},
            "optimizer": {str(i): one for i, one in optimizer.state_dict()["state"].items()},
            "rate": torch.tensor(optimizer.param_groups[0]["lr"]),
            "values": torch.tensor([state.done, state.total, state.own, state.step], dtype=torch.float64),
            "draws": torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64),
            "generator": state.generator.get_state(),
        }


STRIKES = (
    Strike(0, "batch 0", 1), Strike(1, "forward 1", 1), Strike(0, "commit 0", 2), Strike(1, "drawn 1", 2),
    Strike(1, "validate 0", 3), Strike(0, "validated 0", 3), Strike(0, "drawn 0", 4), Strike(1, "validate 1", 4),
    Strike(0, "updated 0", 5),
)  # fmt: skip


@pytest.mark.slow
def test_a_commit_of_several_updates_is_done_again_as_a_whole(tmp_path: Path) -> None:
    """A survivor heard of the loss in a validation of an epoch's first commit, and stayed in evaluation."""
    loop = Loop(updates=2, validates=1, averages=True, samples=48)
    expected, ended = run_twice(_train, 2, Job("", STRIKES), loop, folder=tmp_path)
    assert_equal(ended.results, expected.results)


@pytest.mark.slow
def test_a_commit_that_counts_after_its_first_update_does_not_use_the_batch_of_the_second(tmp_path: Path) -> None:
    """Behind a hundred commits of one update there is no copy with which the first update could be taken back. The step
    counted, and the batch that the loop had taken for its second update was lost.
    """
    loop = Loop(updates=2, draws=False, norm=False, dropout=0.0, quiet=104, samples=360)
    strikes = (Strike(1, "forward 1", 104), Strike(2, "updated 0", 106))
    expected, ended = run_twice(_train, 3, Job("", strikes), loop, folder=tmp_path)
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert_equal(mine["weights"], theirs["weights"])


def _train_and_read_the_log(job: Job, loop: Loop) -> int:
    with logged() as lines:
        _train(job, loop)
    return sum("a scheduler has stepped between state.commit() and the next backward" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("schedules", ["update", "commit", "behind"])
def test_a_scheduler_that_steps_behind_the_commit_is_told_of_once(schedules: str, tmp_path: Path) -> None:
    """After a loss its latest step was missing, and nothing said so."""
    loop = Loop(schedules=schedules, draws=False)
    ended = SmallAgent(_train_and_read_the_log, 2, Job(str(tmp_path)), loop, folder=tmp_path).run()
    assert ended.results == [int(schedules == "behind")] * 2
