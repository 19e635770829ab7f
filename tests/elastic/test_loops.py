"""Loops that do more than forward, backward, update, commit: a loss in between costs them no bit either."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Numbers, Strike
from tests.elastic.small_agent import run_twice
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.data import DistributedSampler
from phalanx.elastic.position import DataPosition
from phalanx.elastic.state import commits_of
from phalanx.testing import run_ranks


def read_ahead(loader: Any, num_batches: int = 3) -> Iterator[Any]:
    """As a prefetcher does that brings batches to a device."""
    batches: deque[Any] = deque()
    for batch in loader:
        batches.append(batch)
        if len(batches) > num_batches:
            yield batches.popleft()
    yield from batches


def bring_nearer(slow: Tensor, fast: Tensor) -> None:
    slow.lerp_(fast, 0.2)


def replace_data(slow: Tensor, fast: Tensor) -> None:
    slow.data = slow.data * 0.8 + fast.data * 0.2


def change_data(slow: Tensor, fast: Tensor) -> None:
    slow.data.mul_(0.8).add_(fast.data, alpha=0.2)


class Momentum(nn.Module):
    """A layer with slow copies of itself, which each forward brings nearer: an encoder of MoCo, in small.

    By each of the ways that such encoders have, of which two leave no trace in the tensor's version.
    """

    ways = (bring_nearer, replace_data, change_data)

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(8, 1)
        self.slow = nn.ModuleList(nn.Linear(8, 1).requires_grad_(False) for _ in self.ways)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for change, layer in zip(self.ways, self.slow, strict=True):
                    for slow, fast in zip(layer.parameters(), self.fast.parameters(), strict=True):
                        change(slow, fast)
        out: Tensor = self.fast(x)
        for layer in self.slow:
            out = out + layer(x)
        return out


def train_loop(job: Job, is_ahead: bool) -> dict[str, Any]:
    """Train as one rank of the job; every rank runs this."""
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), Momentum())
        model.register_buffer("updates", torch.zeros(()))
        judge = nn.Linear(1, 1)
        torch.manual_seed(100 + dist.get_rank())
        ddp = phalanx.DistributedDataParallel(model, check=False)
        judging = phalanx.DistributedDataParallel(judge, check=False)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        second = torch.optim.SGD(judging.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        of_epochs = torch.optim.lr_scheduler.StepLR(second, 1, 0.9)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=job.batch, sampler=sampler)
        state: Any = elastic.State(
            model=ddp, optimizer=optimizer, scheduler=scheduler, average=average, sampler=sampler, seen=0,
            second=second, judge=judging, of_epochs=of_epochs,
        )  # fmt: skip

        def reduce(value: Tensor, place: str) -> None:
            job.strike(place, state.step)
            dist.all_reduce(value.detach().clone())

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(job.epochs):
                for ids, x, y in read_ahead(loader) if is_ahead else loader:
                    job.log(state.step, epoch, ids.tolist())
                    second.zero_grad()
                    judging(ddp(x).detach()).mean().backward()
                    second.step()
                    job.strike("second update", state.step)
                    optimizer.zero_grad()
                    out = ddp(x)
                    loss = (out.squeeze(1) - y).pow(2).mean()
                    job.strike("backward", state.step)
                    with contextlib.suppress(RuntimeError):
                        (loss + judging(out).mean()).backward()
                    optimizer.step()
                    reduce(loss, "behind the update")
                    scheduler.step()
                    average.update_parameters(model)
                    state.seen += len(ids)
                    model.get_buffer("updates").add_(1)
                    job.strike("buffer", state.step)
                    state.commit(samples=len(ids) if is_ahead else None)
                    if state.step == 3:
                        ddp.eval()
                        reduce(loss, "validation")
                        ddp.train()
                of_epochs.step()
                reduce(torch.zeros(()), "end of epoch")

        train(state)
        models = {"model": ddp, "judge": judge, "average": average}
        weights = {f"{name} {key}": value for name, m in models.items() for key, value in m.state_dict().items()}
        steps = torch.tensor([state.step, state.epoch, state.seen, scheduler.last_epoch, of_epochs.last_epoch])
        return {
            **weights,
            "steps": steps,
            "rate": torch.tensor(optimizer.param_groups[0]["lr"]),
            "random": torch.get_rng_state(),
        }


STRIKES = {
    "few": (Strike(0, "behind the update", 1), Strike(1, "buffer", 5), Strike(0, "end of epoch", 8)),
    "many": (
        Strike(1, "second update", 0), Strike(0, "behind the update", 1), Strike(1, "validation", 3),
        Strike(0, "buffer", 5), Strike(1, "end of epoch", 8), Strike(0, "backward", 10), Strike(0, "end of epoch", 16),
    ),
    "ahead": (Strike(1, "backward", 3), Strike(0, "backward", 6), Strike(1, "backward", 15)),
}  # fmt: skip


@pytest.mark.slow(but=("few",))
@pytest.mark.parametrize("strikes", STRIKES)
def test_what_a_loop_does_behind_its_update_is_done_once_for_each_step(strikes: str, tmp_path: Path) -> None:
    """A step that was past an update when a rank was lost counted as done, although the rest of it was missing.

    So a GAN's second update was, or a scheduler's step, an average of the model, a value; a scheduler that stepped at
    the end of an epoch stepped twice, and an epoch's end counted as a step. A buffer changed behind the update went
    back to what it was before, and a model that was being validated trained on in evaluation mode.

    A momentum encoder, which forward changes, changed twice on survivors where the step was done again; later only if
    it was changed through `.data`, as the official one of MoCo is.

    A loop that swallowed the error of its backward, by which it was to hear of the loss, updated with the gradients of
    its rank alone. A loop that took batches ahead lost those that it had not used.
    """

    expected, ended = run_twice(train_loop, 2, Job("", STRIKES[strikes]), strikes == "ahead", folder=tmp_path)
    job = Job(str(tmp_path / "struck"))
    assert_equal(ended.results, expected.results)
    assert [sorted(used) for used in job.samples_of_epochs()] == [list(range(job.samples))] * job.epochs


def loader_of(length: int = 16, batch: int = 4) -> tuple[Any, Any]:
    data = Numbers(length)
    sampler = phalanx.DistributedSampler(data)
    return sampler, DataLoader(data, batch_size=batch, sampler=sampler)


def test_a_commit_counts_the_samples_that_it_is_told_and_refuses_what_cannot_be() -> None:
    sampler, loader = loader_of()
    state = elastic.State(sampler=sampler)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state.commit(samples=4)
    assert state.state_dict()["position"]["consumed"] == 4
    state.commit(samples=4)
    assert state.state_dict()["position"]["consumed"] == 8
    with pytest.raises(ValueError, match=r"commit\(samples=8\): this makes 16 .* has yielded only 12.*of this rank"):
        state.commit(samples=8)
    for wrong in (-1, 2.0, True):
        with pytest.raises(ValueError, match="pass how many samples"):
            state.commit(samples=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples= was passed earlier in this epoch"):
        state.commit()
    batches = iter(loader)  # the next epoch
    next(batches)
    state.commit()
    next(batches)
    with pytest.raises(ValueError, match="the epoch's first commit had no samples="):
        state.commit(samples=4)
    with pytest.raises(ValueError, match="State has no sampler"):
        elastic.State(best=0.0).commit(samples=4)


def test_samples_are_refused_where_a_step_may_be_done_without_its_commit() -> None:
    """A round, or an update in shards, counted after a loss, and its samples did not: they were trained on twice."""
    for place, kind in (("rounds", phalanx.LocalSGD), ("sharded", phalanx.ZeroRedundancyOptimizer)):
        sampler, loader = loader_of()
        state = elastic.State(sampler=sampler)
        setattr(commits_of(state).objects, place, [object.__new__(kind)])  # a whole one needs a group
        batches = iter(loader)
        next(batches)
        with pytest.raises(ValueError, match=rf"samples=4\): State has {kind.__name__}.*no prefetcher"):
            state.commit(samples=4)
        state.commit()


def test_a_prefetcher_that_crosses_the_end_of_an_epoch_is_told_to_end_with_it() -> None:
    """What it had left of the one was counted for the next, and a loss skipped as much of that."""

    def forever(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    sampler, loader = loader_of()
    state = elastic.State(sampler=sampler)
    ahead = forever(loader)
    for _ in range(4):
        next(ahead)
    state.commit(samples=4)
    state.commit(samples=4)
    next(ahead)
    with pytest.raises(ValueError, match=r"began the next epoch after .* 8 of 16 samples .* Stop the prefetcher"):
        state.commit(samples=4)


@pytest.mark.parametrize("how", ["by state.epochs", "by itself", "broken off", "broken off, by state.epochs"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_leaves_samples_of_its_own_will_goes_over_to_the_next(how: str, drop_last: bool) -> None:
    data = Numbers(18)
    sampler = phalanx.DistributedSampler(data)
    loader: Any = DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)
    state = elastic.State(sampler=sampler)
    steps = 2 if "broken" in how else None
    for _ in state.epochs(3) if "state.epochs" in how else range(3):
        for ids, *_ in islice(read_ahead(loader, 2), steps):
            state.commit(samples=len(ids))
    assert state.step == 3 * (steps or (4 if drop_last else 5))


def test_a_loop_that_reads_ahead_and_does_not_say_so_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its last steps of an epoch have no samples of their own; before that nobody can tell."""
    sampler, loader = loader_of()
    state = elastic.State(sampler=sampler)
    for _ in state.epochs(2):
        for _ in read_ahead(loader, 2):
            state.commit()
    told = [
        one.getMessage() for one in caplog.records if "yielded no sample since the previous step" in one.getMessage()
    ]
    assert len(told) == 1
    assert "state.commit(samples=len(batch))" in told[0]
    caplog.clear()
    sampler, loader = loader_of(length=18)
    state = elastic.State(sampler=sampler)
    for _ in state.epochs(2):
        for _ in loader:
            state.commit()
    assert not caplog.records


@pytest.mark.slow(but=("2-True-2", "5-False-0"))
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_batches", [2, 5])
def test_a_loop_that_was_left_has_used_what_it_got_not_what_workers_read_ahead(
    num_workers: int, drop_last: bool, num_batches: int
) -> None:
    """The iterator was gone with its count: a commit behind the loop skipped what the workers had prefetched."""

    def leave(rank: int, world_size: int) -> tuple[int, int]:
        sampler = DistributedSampler(range(34), num_replicas=1, rank=0, shuffle=False)
        position = DataPosition(sampler, lambda *_: None)
        loader = DataLoader(range(34), 4, sampler=sampler, num_workers=num_workers, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
        for _ in islice(loader, num_batches):
            pass
        used = position.mark().used
        for _ in loader:
            pass
        return used, position.mark().used

    assert run_ranks(leave, 1, backend=None) == [(4 * num_batches, 34)]
