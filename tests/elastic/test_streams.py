"""Elastic jobs read streams: whoever is lost, replaced, added or taken away, each sample is used once.

By hand, a thousand: `pytest tests/elastic/test_streams.py --streams 1000 --first-stream 0`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comparisons import assert_equal
from tests.data.streams import Shards, draw_layout, draw_shards
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import LEAVES, SmallAgent
from tests.training import copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.elastic import points

_PLACES = ("batch", "forward", "update", "updated", "commit")
_POINTS = ("lost", "leave", "meet", "agree", "rebind", "hand over", "restore")
_SHARES = 6


def as_sample(number: int) -> tuple[int, Tensor]:
    return number, torch.randn(4, generator=torch.Generator().manual_seed(number))


def train_stream(
    job: Job, shards: Shards, layout: dict[str, int], shuffle: bool, loader_of: str = "torch"
) -> dict[str, Any]:
    """What every rank runs."""
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
                    job.wait(state.step)
                    ddp(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()

        train(state)
        return {"weights": copy_state(ddp), "step": state.step}


def draw_strikes(draw: random.Random, num_steps: int, world_size: int) -> tuple[Strike, ...]:
    rank = draw.randrange(world_size)  # two others at once may be all who hold the state
    strikes = [
        Strike(rank, draw.choice(_PLACES), draw.randrange(max(1, num_steps))) for _ in range(draw.choice((0, 1, 1, 2)))
    ]
    if strikes and world_size >= 3 and draw.random() < 0.3:
        strikes.append(Strike((strikes[0].rank + 1) % world_size, draw.choice(_POINTS), -1))
    return tuple(strikes)


def let_others_come(folder: Path, add: int) -> Callable[[SmallAgent], None]:
    def on_turn(agent: SmallAgent) -> None:
        if (folder / "come").exists():
            return
        if all((folder / f"waits-{seat.process.pid}").exists() for seat in agent.seats.values()):
            agent.regroup(add=add)
            time.sleep(0.1)  # a rank looks every 20 ms whether somebody comes
            (folder / "come").touch()

    return on_turn


def run_drawn(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    shards, layout, world_size = draw_shards(draw), draw_layout(draw), draw.choice((2, 2, 3, 4))
    batch, total = draw.choice((1, 2, 3, 4)), sum(shards.lengths)
    num_steps = min(12, -(-total // (world_size * batch)))
    strikes = draw_strikes(draw, num_steps, world_size)
    change = draw.choice(("none", "none", "grows", "grows", "shrinks"))
    at = draw.randrange(1, max(2, num_steps))
    strikes = tuple(one for one in strikes if change == "none" or one.step not in (at - 1, at, -1))
    job = Job(
        str(folder),
        strikes,
        epochs=draw.choice((1, 1, 2)),
        batch=batch,
        workers=draw.choice((0, 1, 2)),
        persistent=draw.random() < 0.5,
        padding=draw.random() < 0.7,
    )
    on_turn = None
    if change == "grows" and at < num_steps:
        job = dataclasses.replace(job, wait_at=at)
        on_turn = let_others_come(folder, draw.choice((1, 2)))
    elif change == "shrinks":
        strikes = strikes[: world_size - 2]  # somebody must be left
        job = dataclasses.replace(job, strikes=(*strikes, Strike(draw.randrange(world_size), "batch", at, LEAVES)))
    os.makedirs(folder)
    told = f"seed {seed}: {shards}, {layout}, {world_size} ranks, {job}, {change} at {at}"
    try:
        args = (job, shards, layout, draw.random() < 0.8)
        ended = SmallAgent(train_stream, world_size, *args, folder=folder, on_turn=on_turn).run()
    except Exception as error:
        raise AssertionError(told) from error
    for used in job.samples_of_epochs():
        counts = Counter(used)
        if job.padding:
            assert set(counts) == set(range(total)), told
            assert len(used) - total < world_size + 2, told
        else:
            assert set(counts.values()) <= {1}, told
            assert total - len(used) < world_size + 2, told
    for one in ended.results:
        assert_equal(one["weights"], ended.results[0]["weights"], told)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES))
def test_a_job_that_loses_and_gains_ranks_uses_each_sample_of_a_stream_once(
    share: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    first = pytestconfig.getoption("--first-stream")
    for seed in range(first + share, first + pytestconfig.getoption("--streams"), _SHARES):
        run_drawn(seed, tmp_path / str(seed))


@pytest.mark.slow(but=("torch",))
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader_of", ["torch", "torchdata"])
def test_a_run_over_a_stream_that_loses_a_rank_ends_with_the_bits_of_one_that_loses_none(
    tmp_path: Path, loader_of: str
) -> None:
    if loader_of == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader")
    shards = Shards((20, 7, 0, 31, 14), ("indexed", "read on", "skips", "read on", "indexed"))
    layout = {"interleave": 3, "readers": 2, "block": 8, "window": 5}
    ends = []
    for name, strikes in (("lost", (Strike(1, "updated", 3), Strike(0, "batch", 11))), ("quiet", ())):
        job = Job(str(tmp_path / name), strikes, batch=4, workers=2)
        os.makedirs(job.folder)
        ends.append(SmallAgent(train_stream, 2, job, shards, layout, True, loader_of, folder=Path(job.folder)).run())
        assert [sorted(used) for used in job.samples_of_epochs()] == [list(range(72))] * 2
    assert len(ends[0].losses) > len(ends[1].losses)
    for mine, theirs in zip(ends[0].results, ends[1].results, strict=True):
        assert mine["step"] == theirs["step"] == 18
        assert_equal(mine["weights"], theirs["weights"])
