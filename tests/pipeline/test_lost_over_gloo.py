"""Nothing aborts a Gloo group when a rank is lost: the ranks that exchange messages with it notify all others.

Survivors stay alive with their error in all of these: a connection that ends with its process would be a notice, too.
"""

import os
import random
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.pipeline.early_all_reduce import EarlyAllReduce
from phalanx.pipeline.schedule import SCHEDULES, plan_schedule
from phalanx.pipeline.wire import Edge, Wire
from phalanx.testing import run_ranks

MICRO_BATCHES = 4
PLACES = ("between", "seen", "sent", "shared", "sent values")


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _is_lost(group, rank):
    """Wait until this process has detected the end of that rank's connection."""
    with pytest.raises(RuntimeError):
        group.recv([torch.zeros(1)], rank, 7).wait()


def _release(rank, world_size, lost):
    """Return on that rank when no other needs its messages any more."""
    if rank != lost:
        dist.group.WORLD.send([torch.zeros(1)], lost, 6).wait()
        return
    for other in range(world_size):
        if other != lost:
            dist.group.WORLD.recv([torch.zeros(1)], other, 6).wait()


def _stay(path, rank, ranks):
    """Wait until all of these ranks have their error; the end of this process would be a notice to them."""
    store = dist.FileStore(str(path), len(ranks))
    store.set(str(rank), "has its error")
    store.wait([str(other) for other in ranks], timedelta(seconds=100))


def _after(owner, method):
    """Die as soon as that has been called."""
    call = getattr(owner, method)
    setattr(owner, method, lambda *args, **kwargs: (call(*args, **kwargs), _die()))


def _prepare(pipe, place):
    """Have this rank die there in its next step: a cell of the schedule, or a place between cells."""
    if place in ("between", "seen"):
        _die()
    elif place == "sent":
        _after(pipe._outcome._early, "_send")
    elif place == "shared":
        _after(pipe._outcome, "share")
    elif place == "sent values":
        _after(pipe._wire, "wait_sent")
    else:
        act = pipe._executor._act
        pipe._executor._act = lambda action, work: _die() if action == place else act(action, work)


def _lose(rank, world_size, lost, schedule, place, evaluates, path):
    """Return the error of this rank, once each survivor has one."""
    stages = world_size * (2 if schedule == "interleaved" else 1)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages)))
    pipe = phalanx.Pipeline(model, micro_batches=MICRO_BATCHES, schedule=schedule, loss_fn=functional.mse_loss)
    x = torch.ones(2 * MICRO_BATCHES, 3)
    pipe.step(x, target=x)
    _release(rank, world_size, lost)
    if rank == lost:
        _prepare(pipe, place)
    elif place == "seen":
        _is_lost(dist.group.WORLD, lost)

    def train():
        for _ in range(3):
            pipe.step(x, target=x)
            if evaluates:
                pipe(x)

    with pytest.raises(RuntimeError) as caught:
        train()
    _stay(path, rank, [other for other in range(world_size) if other != lost])
    with pytest.raises(phalanx.ClosedError):
        pipe.step(x, target=x)
    return str(caught.value)


def _check(world_size, lost, schedule, place, folder, *, evaluates=False):
    path = str(folder / f"store_{world_size}_{lost}_{schedule}_{place}".replace(" ", ""))
    texts = run_ranks(_lose, world_size, lost, schedule, place, evaluates, path, backend="gloo", lost=[lost])
    own = plan_schedule(schedule, world_size, MICRO_BATCHES).stages_of(lost)
    for rank, text in enumerate(texts):
        if rank != lost:
            where = f"{world_size} ranks, rank {lost} lost, {schedule}, {place}: rank {rank} raised: {text}"
            assert "Timed out" not in text, where
            assert f"rank {lost}" in text or any(f"waiting for stage {stage}" in text for stage in own), where


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_every_survivor_is_notified_of_a_rank_lost_between_steps(lost, tmp_path):
    """The first rank's receives for the end of the step failed at once, before any stage was notified: it waited there
    for a rank that waited for its inputs."""
    _check(3, lost, "1f1b", "seen", tmp_path)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_survivors_are_notified_in_the_next_step_of_a_rank_lost_at_the_end_of_one(lost, tmp_path):
    """A rank that detected the loss refused the next step by itself, while the others waited for its messages."""
    _check(3, lost, "zero_bubble", "shared", tmp_path, evaluates=lost == 1)


def _cells(world_size):
    """Each rank as the lost one, at each of its cells and places between them, in each schedule."""
    for schedule in SCHEDULES:
        for rank, order in enumerate(plan_schedule(schedule, world_size, MICRO_BATCHES).orders):
            for place in (*PLACES, *order):
                yield world_size, rank, schedule, place


@pytest.mark.slow
def test_every_survivor_is_notified_of_a_rank_lost_in_any_cell(effort, seed, tmp_path):
    every = [*_cells(3), *_cells(4)]
    for world_size, lost, schedule, place in random.Random(4 + seed).sample(every, min(len(every), 2 * effort)):
        _check(world_size, lost, schedule, place, tmp_path)


@pytest.mark.parametrize("lost", [1, 2])
def test_the_first_rank_notifies_those_behind_the_lost_one(lost, tmp_path):
    """It notified the others in turn, and stopped at the first to which it could not send."""

    def reduce(rank, world_size):
        group = dist.group.WORLD
        reduction, numbers = EarlyAllReduce(group, 8), torch.ones(3, dtype=torch.float64)
        reduction.begin(3)
        _release(rank, world_size, lost)
        if rank == lost:
            _die()
        if rank:
            reduction.add(numbers)
        else:
            _is_lost(group, lost)
            with pytest.raises(RuntimeError, match=f"connection to rank {lost}"):
                reduction.add(numbers)
            reduction.leave(torch.full((3,), 5.0, dtype=torch.float64), stay_s=0.0)
        _stay(tmp_path / "store", rank, [0, 3 - lost])
        return numbers.tolist()

    assert run_ranks(reduce, 3, backend="gloo", lost=[lost])[3 - lost] == [5.0] * 3


def test_a_stage_notifies_those_behind_it_though_the_next_one_is_lost(tmp_path):
    """Its first message, to the lost one, failed, and it sent no other."""

    def notify(rank, world_size):
        group, edges = dist.group.WORLD, [Edge(1, 2), Edge(1, 0, True)]
        wire = Wire(group, [0, 1, 2], torch.device("cpu"))
        _release(rank, world_size, 2)
        if rank == 2:
            _die()
        if rank == 0:
            with pytest.raises(phalanx.PhalanxError) as caught:
                wire.receive_gradients(edges[1], [torch.zeros(1)])
            _stay(tmp_path / "store", rank, [0, 1])
            return str(caught.value)
        _is_lost(group, 2)
        wire.notify_failure(edges, "stage 2 is gone", lost=False, waits=True)
        _stay(tmp_path / "store", rank, [0, 1])

    assert run_ranks(notify, 3, backend="gloo", lost=[2])[0] == "stage 2 is gone"
