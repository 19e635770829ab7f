"""`batch="global"`: with fewer ranks a step is the same step, up to rounding."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.jobs import Strike, train_job
from tests.elastic.small_agent import Ended, SmallAgent
from tests.elastic.steps import PLAIN, samples_of_steps
from tests.training import copy_parameters
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.data import DistributedSampler
from phalanx.testing import run_ranks

KINDS = {
    # ranks, kills, job: its samples leave a last step of each epoch with fewer
    "3 to 2": (3, (Strike(1, "backward", 3),), dataclasses.replace(PLAIN, samples=101, workers=2)),
    "2 to 1": (2, (Strike(0, "updated", 5),), dataclasses.replace(PLAIN, samples=58, zero_first=True)),
    "4 to 2": (
        4,
        (Strike(3, "backward", 2), Strike(0, "commit", 7)),
        dataclasses.replace(PLAIN, samples=140, amp=True, scheduler=True, clip=True, zero_first=True),
    ),
    "3 to 2, in shards": (
        3,
        (Strike(2, "forward", 4),),
        dataclasses.replace(PLAIN, samples=97, optimizer="zero", scheduler=True, clip=True),
    ),
}


@pytest.mark.slow(but=("2 to 1",))
@pytest.mark.parametrize("kind", KINDS)
def test_with_fewer_ranks_each_step_has_the_samples_that_it_had_and_ends_in_the_same_weights(
    kind: str, tmp_path: Path
) -> None:
    world_size, strikes, job = KINDS[kind]

    def run_job(name: str, strikes: tuple[Strike, ...]) -> Ended:
        folder = tmp_path / name
        folder.mkdir()
        mine = dataclasses.replace(job, folder=str(folder), strikes=strikes)
        return SmallAgent(train_job, world_size, mine, folder=folder, replace=False).run()

    expected, ended = run_job("undisturbed", ()), run_job("disturbed", strikes)
    assert (len(expected.results), len(ended.results)) == (world_size, world_size - len(strikes))
    steps = samples_of_steps(tmp_path / "undisturbed")
    assert samples_of_steps(tmp_path / "disturbed") == steps
    assert len(steps) == job.epochs * -(-job.samples // (world_size * job.batch))
    theirs = expected.results[0]
    for mine in ended.results:
        assert (mine["step"], mine["rate"], mine["scale"]) == (theirs["step"], theirs["rate"], theirs["scale"])
        torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=1e-3, atol=1e-5)


GROWING = {
    # ranks, how many come at which step, job: the last steps of an epoch have fewer samples than ranks
    "2 to 3": (2, 1, 4, dataclasses.replace(PLAIN, samples=101, workers=2)),
    "1 to 3": (1, 2, 3, dataclasses.replace(PLAIN, samples=61, zero_first=True, clip=True)),
    "2 to 4, which divides": (2, 2, 5, dataclasses.replace(PLAIN, samples=96, optimizer="momentum", scheduler=True)),
    "2 to 5": (2, 3, 2, dataclasses.replace(PLAIN, samples=66, scheduler=True, clip=True, zero_first=True)),
    "2 to 3, in shards": (2, 1, 3, dataclasses.replace(PLAIN, samples=60, optimizer="zero", scheduler=True, clip=True)),
    "2 to 3, whole batches": (2, 1, 3, dataclasses.replace(PLAIN, samples=103, drop_last=True, workers=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROWING)
def test_with_more_ranks_than_at_the_start_each_step_has_the_samples_that_it_had_and_ends_in_the_same_weights(
    kind: str, tmp_path: Path
) -> None:
    """A host that came late ended a healthy job: there were more ranks than batches in a step."""
    world_size, more, at, job = GROWING[kind]
    ends = []
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        mine = dataclasses.replace(job, folder=str(folder), grow_at=at if name == "disturbed" else -1)

        def welcome_others(agent: SmallAgent, folder: Path = folder) -> None:
            if agent.generation == 0 and len(list(folder.glob("waits-*"))) == world_size:
                agent.regroup(add=more)

        ends.append(SmallAgent(train_job, world_size, mine, folder=folder, on_turn=welcome_others).run())
    assert [len(end.results) for end in ends] == [world_size, world_size + more]
    steps, grown = (samples_of_steps(tmp_path / name) for name in ("undisturbed", "disturbed"))
    assert {step: set(samples) for step, samples in grown.items()} == {step: set(s) for step, s in steps.items()}
    twice = [step for step in steps if len(grown[step]) > len(steps[step])]
    assert all(len(grown[step]) == world_size + more for step in twice)  # there were fewer samples than ranks
    theirs = ends[0].results[0]
    for result in ends[1].results:
        assert (result["step"], result["rate"], result["scale"]) == (theirs["step"], theirs["rate"], theirs["scale"])
        torch.testing.assert_close(result["weights"], theirs["weights"], rtol=1e-3, atol=1e-5)


def batches_of(
    case: tuple[int, bool, bool, int, int], rank: int, readers: int | None
) -> tuple[list[list[list[int]]], DistributedSampler]:
    """Two epochs of one rank."""
    length, padding, drop_last, batch, parts = case
    data = list(range(length))
    sampler = DistributedSampler(data, parts, 0, drop_last=drop_last, padding=padding)
    sampler.regroup(parts, rank, num_readers=readers)
    sampler.read_in_turns_of(batch)
    loader = DataLoader(data, batch, sampler=sampler)
    return [[one.tolist() for one in loader] for _ in range(2)], sampler


@pytest.mark.parametrize(
    "case", [(97, True, False, 4, 3), (96, False, False, 5, 4), (50, True, True, 4, 3), (7, True, False, 4, 4)]
)
def test_each_batch_of_a_full_job_is_made_by_one_of_fewer_readers_in_the_same_step(case: Any) -> None:
    parts = case[-1]
    whole = [batches_of(case, rank, None)[0] for rank in range(parts)]
    for readers in range(1, parts + 1):
        for rank in range(readers):
            mine, sampler = batches_of(case, rank, readers)
            for epoch in range(2):
                steps = zip(*(whole[part][epoch] for part in range(rank, parts, readers)), strict=True)
                assert mine[epoch] == [batch for step in steps for batch in step]
                assert sum(map(len, mine[epoch])) == len(sampler)
            assert sampler.state_dict()["epoch"] == 2 or case[2]


SHARED = [(97, True, False, 4, 3), (96, False, False, 5, 4), (50, True, True, 4, 3), (3, True, False, 2, 2)]


@pytest.mark.slow(but=("case1",))
@pytest.mark.parametrize("case", SHARED)
def test_more_readers_than_parts_share_the_samples_of_each_step(case: Any) -> None:
    length, _, _, batch, parts = case
    whole = [batches_of(case, rank, None)[0] for rank in range(parts)]
    for readers in range(parts + 1, 3 * parts + 2):
        shares, samplers = zip(*(batches_of(case, rank, readers) for rank in range(readers)), strict=True)
        for epoch in range(2):
            for step, theirs in enumerate(zip(*(whole[part][epoch] for part in range(parts)), strict=True)):
                expected = sorted(sample for one in theirs for sample in one)
                mine = [share[epoch][step] for share in shares]
                sizes = [len(one) for one in mine]
                assert max(sizes) - min(sizes) <= 1
                found = sorted(sample for one in mine for sample in one)
                assert found == expected or len(expected) < readers == len(found)
            assert {len(share[epoch]) for share in shares} == {len(whole[0][epoch])}
        assert len({(sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) for sampler in samplers}) == 1
        assert len(DataLoader(list(range(length)), batch, sampler=samplers[0])) == len(whole[0][0])
    uneven = DistributedSampler(list(range(length)), parts, 0, padding=False)
    if length % parts:
        with pytest.raises(ValueError, match=f"{length} samples do not divide by {parts} parts"):
            uneven.regroup(parts, 0, num_readers=parts + 1)


def on_two_ranks(rank: int, world_size: int) -> None:
    """What is refused at the door; and one step of a GAN's discriminator, two backwards, as on three."""
    net = nn.Linear(3, 1)
    ddp = phalanx.DistributedDataParallel(net, check=False)
    data = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
    sampler = phalanx.DistributedSampler(data, padding=False, shuffle=False)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
    for problem, things in {
        "through a sampler": {"model": ddp},
        "no model is one": {"model": net, "sampler": sampler},
        "PyTorch's DistributedDataParallel": {
            "model": nn.parallel.DistributedDataParallel(nn.Linear(3, 1)), "sampler": sampler
        },
        "do not divide by 2": {"model": ddp, "sampler": DistributedSampler([1, 2, 3], padding=False)},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            elastic.State(batch="global", **things)
    with pytest.raises(ValueError, match="'global' or None, got 16"):
        elastic.State(batch=16, model=ddp)  # type: ignore[arg-type]

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    state = elastic.State(batch="global", model=ddp, optimizer=optimizer, sampler=sampler, scheduler=scheduler)
    torch.save(state.state_dict(), io.BytesIO())  # the scheduler's held its own method, and with it the whole optimizer
    assert "step" not in scheduler.state_dict()
    with pytest.raises(RuntimeError, match="inside no_sync"), ddp.no_sync():
        ddp(data)
    saved = state.state_dict()
    state.load_state_dict({**saved, "micro_batches": 3})  # as a job of three ranks has left it
    start = copy_parameters(ddp)
    for x in DataLoader(data, 4, sampler=sampler):
        optimizer.zero_grad()
        ddp(x).mean().backward()
        (-ddp(x * 2).pow(2)).mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 3.0)
        optimizer.step()
        state.commit()
    assert state.step == 2
    alone = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), start, strict=True):
            parameter.copy_(value)
    for x in data.chunk(2):
        alone.zero_grad()
        (alone(x).mean() - alone(x * 2).pow(2).mean()).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 3.0)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter -= 0.5 * parameter.grad
    torch.testing.assert_close(list(ddp.parameters()), list(alone.parameters()), rtol=1e-4, atol=1e-5)


def test_what_does_not_go_with_it_is_refused_and_several_backwards_in_a_step_do() -> None:
    run_ranks(on_two_ranks, 2)
