"""An elastic job reads a stream and loses a rank: each sample is used once, and no bit is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comparisons import assert_equal
from tests.data.streams import Shards
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import run_twice
from tests.training import copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.elastic import points


def as_sample(number: int) -> tuple[int, Tensor]:
    return number, torch.randn(4, generator=torch.Generator().manual_seed(number))


def train_stream(
    job: Job, shards: Shards, layout: dict[str, int], shuffle: bool, loader_of: str = "torch"
) -> dict[str, Any]:
    """Train as one rank of the job; every rank runs this."""
    kind: Any = DataLoader
    if loader_of == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        ddp = phalanx.DistributedDataParallel(model, check=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        numbers = range(len(shards.lengths))
        stream = phalanx.data.Stream(numbers, shards.read, lengths=shards.lengths, transform=as_sample, **layout)
        sampler = phalanx.DistributedSampler(stream, shuffle=shuffle, drop_last=not job.padding)
        loader: Any = kind(
            stream, job.batch, sampler=sampler, num_workers=job.workers,
            persistent_workers=job.persistent and job.workers > 0,
            **({"prefetch_factor": 3} if job.workers else {}),
        )  # fmt: skip
        state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler)
        model[0].register_forward_hook(lambda *_: job.strike("forward", state.step))
        optimizer.register_step_pre_hook(lambda *_: job.strike("update", state.step))
        optimizer.register_step_post_hook(lambda *_: job.strike("updated", state.step))
        points.listen(lambda point: job.strike(point, state.step))

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(job.epochs):
                for ids, x in loader:
                    job.strike("batch", state.step)
                    job.log(state.step, epoch, ids.tolist())
                    ddp(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()

        train(state)
        return {"weights": copy_state(ddp), "step": state.step}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader_of", ["torch", "torchdata"])
def test_a_run_over_a_stream_that_loses_a_rank_ends_with_the_bits_of_one_that_loses_none(
    tmp_path: Path, loader_of: str
) -> None:
    if loader_of == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader")
    shards = Shards((20, 7, 0, 31, 14), ("indexed", "read on", "skips", "read on", "indexed"))
    layout = {"interleave": 3, "readers": 2, "block": 8, "window": 5}
    job = Job("", (Strike(1, "updated", 3), Strike(0, "batch", 11)), batch=4, workers=2)
    expected, ended = run_twice(train_stream, 2, job, shards, layout, True, loader_of, folder=tmp_path)
    for name in ("quiet", "struck"):
        used = Job(str(tmp_path / name)).samples_of_epochs()
        assert [sorted(samples) for samples in used] == [list(range(72))] * 2
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert mine["step"] == theirs["step"] == 18
        assert_equal(mine["weights"], theirs["weights"])
