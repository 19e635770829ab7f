"""Datasets that draw random numbers, in workers, where ranks are lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import run_twice
from tests.training import copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx import elastic


class Augmented(Dataset[Any]):
    """Images that are flipped, shifted and made noisy at random, with all three generators."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        image = torch.arange(16.0).view(4, 4) + i % 7
        image = image.flip(1) if random.random() < 0.5 else image
        image = image.roll(int(np.random.randint(4)), dims=0)
        return i, image + 0.1 * torch.randn(4, 4), torch.tensor(float(i % 3))


def train_augmented(job: Job) -> dict[str, Any]:
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        ddp = phalanx.DistributedDataParallel(nn.Linear(16, 1), check=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001, momentum=0.9)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + dist.get_rank())
        data = Augmented()
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(
            data, batch_size=4, sampler=sampler, num_workers=job.workers, persistent_workers=job.persistent,
            multiprocessing_context=job.starts_workers if job.workers else None,
        )  # fmt: skip
        state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler)
        seen: dict[tuple[int, int], Tensor] = {}

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(2):
                for ids, x, y in loader:
                    seen.update({(epoch, i): one for i, one in zip(ids.tolist(), x, strict=True)})
                    job.strike("batch", state.step)
                    optimizer.zero_grad()
                    (ddp(x.flatten(1)).squeeze(1) - y).pow(2).mean().backward()
                    optimizer.step()
                    state.commit()

        train(state)
        return {"weights": copy_state(ddp), "seen": seen}


@pytest.mark.slow(but=("0-False-fork",))
@pytest.mark.parametrize(
    ("workers", "persistent", "method"),
    [(0, False, "fork"), (1, False, "fork"), (1, True, "fork"), (1, True, "forkserver")],
)
def test_what_a_dataset_draws_after_a_loss_is_what_it_would_have_drawn(
    workers: int, persistent: bool, method: str, tmp_path: Path
) -> None:
    """Workers that were started again in the middle of an epoch were seeded anew, as at its begin: the rest of the
    epoch had other flips and shifts than in a run that nobody disturbed, on survivors as on the replacement.
    """

    strikes = (Strike(1, "batch", 3), Strike(0, "batch", 13))
    job = Job("", strikes, workers=workers, persistent=persistent, starts_workers=method)
    expected, ended = run_twice(train_augmented, 2, job, folder=tmp_path)
    drawn = {}
    for one in expected.results:
        drawn.update(one["seen"])
    assert len(drawn) == 128
    assert all(not torch.equal(drawn[0, i], drawn[1, i]) for i in range(64)), "each epoch draws others"
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert_equal(mine["seen"], {key: drawn[key] for key in mine["seen"]})
        assert_equal(mine["weights"], theirs["weights"])
