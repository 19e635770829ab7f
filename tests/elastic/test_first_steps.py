"""Ranks lost in a job's first steps, when wrappers and loaders have just begun, or while a layer is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import differences
from tests.elastic.small_agent import run_twice
from tests.training import copy_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import elastic


def _train(job: Job, freezes: bool) -> dict[str, Any]:
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        ddp = phalanx.DistributedDataParallel(net, find_unused_parameters=freezes)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(5)))
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(
            data, 4, sampler=sampler, num_workers=job.workers, persistent_workers=bool(job.workers)
        )
        torch.manual_seed(100 + dist.get_rank())
        state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler)

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(3):
                net[0].requires_grad_(not freezes or epoch != 1)
                for (x,) in loader:
                    optimizer.zero_grad()
                    loss = ddp(x).square().mean()
                    job.strike("forward", state.step)
                    loss.backward()
                    optimizer.step()
                    state.commit()

        train(state)
        return {"weights": copy_state(ddp), "random": torch.rand(1), "steps": state.step}


@pytest.mark.slow
def test_workers_that_last_over_a_loss_leave_the_random_states_as_they_would_be(tmp_path: Path) -> None:
    """A survivor went back to before its loader had drawn a seed, and the loader, which lasts, drew none again."""
    strikes = (Strike(0, "forward", 0), Strike(1, "forward", 1), Strike(0, "forward", 6))
    job = Job("", strikes, workers=1, persistent=True)
    expected, ended = run_twice(_train, 2, job, False, folder=tmp_path)
    assert_equal(ended.results, expected.results)


@pytest.mark.slow
def test_a_rank_may_be_lost_while_a_layer_is_frozen(tmp_path: Path) -> None:
    """The wrapper could not register its hooks with parameters of survivors that were frozen at that moment."""
    job = Job("", (Strike(1, "forward", 7), Strike(0, "forward", 12)))
    expected, ended = run_twice(_train, 2, job, True, folder=tmp_path)
    assert_equal(ended.results, expected.results)


def _unfreeze(job: Job) -> dict[str, Any]:
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        ddp = phalanx.DistributedDataParallel(net, find_unused_parameters=True)
        net[0].requires_grad_(False)
        optimizer = torch.optim.SGD(net[1:].parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(5)))
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, 4, sampler=sampler)
        state: Any = elastic.State(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler, unfrozen=False)
        optimizer.register_step_post_hook(lambda *_: job.strike("updated", state.step))

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(3):
                if epoch == 1 and not state.unfrozen:
                    net[0].requires_grad_(True)
                    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.01, "initial_lr": 0.01})
                    scheduler.base_lrs.append(0.01)
                    state.unfrozen = True
                for (x,) in loader:
                    optimizer.zero_grad()
                    loss = ddp(x).square().mean()
                    job.strike("forward", state.step)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    state.commit()

        train(state)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        momenta = [optimizer.state[p]["momentum_buffer"] for group in optimizer.param_groups for p in group["params"]]
        return {"weights": copy_state(ddp), "groups": groups, "momenta": momenta, "base_lrs": scheduler.base_lrs}


@pytest.mark.slow
def test_a_group_that_the_loop_has_added_since_the_commit_is_removed_again(tmp_path: Path) -> None:
    """`state.unfrozen` went back and the group did not, so that the loop added it twice, which ended the job."""
    strikes = (Strike(1, "forward", 4), Strike(0, "updated", 4), Strike(1, "updated", 6))
    expected, ended = run_twice(_unfreeze, 2, Job("", strikes), folder=tmp_path)
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert not differences(mine, theirs)
