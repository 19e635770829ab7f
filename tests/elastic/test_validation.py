"""A rank is lost in a validation, in which all ranks run the model forward."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Numbers, Strike, build
from tests.elastic.small_agent import SmallAgent
from tests.training import copy_state
from torch import Tensor
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic


def train_and_validate(job: Job) -> dict[str, Tensor]:
    with phalanx.init(timeout=60.0):
        ddp, optimizer, _ = build(job)
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader = DataLoader(data, batch_size=job.batch, sampler=sampler)
        state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler)

        @elastic.run(state)
        def train(state: elastic.State) -> None:
            for _ in state.epochs(job.epochs):
                for _, x, y in loader:
                    (ddp(x).squeeze(1) - y).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
                ddp.eval()
                with torch.no_grad():
                    total = ddp(torch.ones(2, 8)).sum()
                job.strike("validation", state.step)
                dist.all_reduce(total)
                ddp.train()

        train(state)
        return copy_state(ddp)


def test_buffers_that_pytorchs_wrapper_broadcasts_are_so_after_a_loss_in_a_validation(tmp_path: Path) -> None:
    """PyTorch's wrapper does not broadcast buffers in the forward after one of an evaluation: the survivor, which had
    begun to validate, did not, and the replacement did. The job ended by a MismatchError.
    """
    ends = []
    for name, strikes in (("lost", (Strike(0, "validation", 8),)), ("quiet", ())):
        (tmp_path / name).mkdir()
        job = Job(str(tmp_path / name), strikes, wrapper="torch")
        ends.append(SmallAgent(train_and_validate, 2, job, folder=tmp_path / name).run())
    assert (ends[0].generations, ends[1].generations) == (1, 0)
    assert_equal(ends[0].results, ends[1].results)
