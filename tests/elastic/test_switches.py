"""Ranks lost where layers or wrappers are switched to something else than at the commit to which all go back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import run_twice
from tests.training import copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import elastic


def _build(wrapper: str) -> tuple[nn.Sequential, Any, Any, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    wrap: Any = nn.parallel.DistributedDataParallel if wrapper == "torch" else phalanx.DistributedDataParallel
    ddp = wrap(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(5)))
    sampler = phalanx.DistributedSampler(data)
    torch.manual_seed(100 + dist.get_rank())
    state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler, means=[])
    return net, ddp, state, DataLoader(data, 4, sampler=sampler)


def _accumulate(job: Job, wrapper: str) -> dict[str, Tensor]:
    """An epoch has five batches: the last one is accumulated, and no update follows. The first ends in a validation."""
    with phalanx.init(timeout=60.0):
        net, ddp, state, loader = _build(wrapper)

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(3):
                job.strike("epoch", epoch)
                for number, (x,) in enumerate(loader):
                    with contextlib.nullcontext() if number % 2 else ddp.no_sync():
                        ddp(x).square().mean().backward()
                    state.means = [*state.means, net[1].running_mean.sum().item()]
                    if number % 2:
                        state.optimizer.step()
                        state.optimizer.zero_grad()
                        if number == 3:
                            job.strike("update", epoch)
                            state.commit()
                state.optimizer.zero_grad()
                if epoch == 0:
                    ddp.eval()
                    with torch.no_grad():
                        total = ddp(torch.ones(2, 4)).sum()
                    job.strike("validation", epoch)
                    dist.all_reduce(total)
                    ddp.train()

        train(state)
        return {**copy_state(ddp), "means": torch.tensor(state.means)}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["phalanx", "torch"])
def test_buffers_are_sent_after_a_loss_only_where_they_would_have_been(wrapper: str, tmp_path: Path) -> None:
    """Behind a forward in `no_sync` the next one takes no buffers of rank 0. After a loss at an epoch's begin it took
    them. PyTorch's wrapper sends none in the forward behind one of an evaluation: the survivor, which had begun to
    validate, did not, and the replacement did. The job ended by a MismatchError.
    """
    strikes = (Strike(0, "validation", 0), Strike(1, "epoch", 1), Strike(0, "epoch", 2))
    expected, ended = run_twice(_accumulate, 2, Job("", strikes), wrapper, folder=tmp_path)
    assert_equal(ended.results, expected.results)
