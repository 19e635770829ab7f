"""Over Gloo nothing ends a group: that a rank is lost is seen by those who talk to it, and told by them to all others.

The others live on with their error in all of these: a connection that ends with its process would be news as well.
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
from phalanx.pipeline.edges import Edge
from phalanx.pipeline.meeting import Meeting
from phalanx.pipeline.schedule import SCHEDULES, plan_schedule
from phalanx.pipeline.wire import Wire
from phalanx.testing import run_ranks

MICRO_BATCHES = 4
PLACES = ("between", "seen", "sent", "shared", "settled")


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _is_lost(group, rank):
    """Return when this process has seen that rank's connection end."""
    with pytest.raises(RuntimeError):
        group.recv([torch.zeros(1)], rank, 7).wait()


def _let_go(rank, world_size, lost):
    """Return on that rank when no other needs anything of it any more."""
    if rank != lost:
        dist.group.WORLD.send([torch.zeros(1)], lost, 6).wait()
        return
    for other in range(world_size):
        if other != lost:
            dist.group.WORLD.recv([torch.zeros(1)], other, 6).wait()


def _live_on(path, rank, ranks):
    """Return when all of these have heard what they were to hear; the end of this process would be news to them."""
    store = dist.FileStore(str(path), len(ranks))
    store.set(str(rank), "has heard it")
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
        _after(pipe._outcome._meeting, "_send")
    elif place == "shared":
        _after(pipe._outcome, "share")
    elif place == "settled":
        _after(pipe._wire, "settle")
    else:
        act = pipe._executor._act
        pipe._executor._act = lambda action, work: _die() if action == place else act(action, work)


def _lose(rank, world_size, lost, schedule, place, evaluates, path):
    """What this rank hears, once each survivor has heard something."""
    stages = world_size * (2 if schedule == "interleaved" else 1)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages)))
    pipe = phalanx.Pipeline(model, micro_batches=MICRO_BATCHES, schedule=schedule, loss_fn=functional.mse_loss)
    x = torch.ones(2 * MICRO_BATCHES, 3)
    pipe.step(x, target=x)
    _let_go(rank, world_size, lost)
    if rank == lost:
        _prepare(pipe, place)
    elif place == "seen":
        _is_lost(dist.group.WORLD, lost)

    def go_on():
        for _ in range(3):
            pipe.step(x, target=x)
            if evaluates:
                pipe(x)

    with pytest.raises(RuntimeError) as caught:
        go_on()
    _live_on(path, rank, [other for other in range(world_size) if other != lost])
    with pytest.raises(phalanx.ClosedError):
        pipe.step(x, target=x)
    return str(caught.value)


def _check(world_size, lost, schedule, place, folder, *, evaluates=False):
    path = str(folder / f"store_{world_size}_{lost}_{schedule}_{place}".replace(" ", ""))
    told = run_ranks(
        _lose, world_size, lost, schedule, place, evaluates, path, backend="gloo", lost=[lost], timeout=120
    )
    own = plan_schedule(schedule, world_size, MICRO_BATCHES).stages_of(lost)
    for rank, text in enumerate(told):
        if rank != lost:
            where = f"{world_size} ranks, rank {lost} lost, {schedule}, {place}: rank {rank} heard: {text}"
            assert "Timed out" not in text, where
            assert f"rank {lost}" in text or any(f"waiting for stage {stage}" in text for stage in own), where


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_lost_between_steps_is_heard_by_all_who_live_on(lost, tmp_path):
    """The first rank's receives for the end of the step failed at once, before any stage was told: it waited where all
    meet for one that waited for its inputs."""
    _check(3, lost, "1f1b", "seen", tmp_path)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_lost_as_a_step_ends_is_heard_in_the_next_one(lost, tmp_path):
    """Who saw it refused the next step by itself, where the others waited for its messages."""
    _check(3, lost, "zero_bubble", "shared", tmp_path, evaluates=lost == 1)


def _cells(world_size):
    """Each rank as the lost one, at each of its cells and places between them, in each schedule."""
    for schedule in SCHEDULES:
        for rank, order in enumerate(plan_schedule(schedule, world_size, MICRO_BATCHES).orders):
            for place in (*PLACES, *order):
                yield world_size, rank, schedule, place


@pytest.mark.slow
def test_a_rank_lost_anywhere_is_heard_by_all_who_live_on(effort, seed, tmp_path):
    every = [*_cells(3), *_cells(4)]
    for world_size, lost, schedule, place in random.Random(4 + seed).sample(every, min(len(every), 2 * effort)):
        _check(world_size, lost, schedule, place, tmp_path)


@pytest.mark.parametrize("lost", [1, 2])
def test_the_first_rank_tells_those_behind_the_lost_one(lost, tmp_path):
    """It told the others in turn, and ended with the one to which it could not send."""

    def meet(rank, world_size):
        group = dist.group.WORLD
        meeting, numbers = Meeting(group, 8), torch.ones(3, dtype=torch.float64)
        meeting.begin(3)
        _let_go(rank, world_size, lost)
        if rank == lost:
            _die()
        if rank:
            meeting.add(numbers)
        else:
            _is_lost(group, lost)
            with pytest.raises(RuntimeError, match=f"connection to rank {lost}"):
                meeting.add(numbers)
            meeting.leave(torch.full((3,), 5.0, dtype=torch.float64), stay_s=0.0)
        _live_on(tmp_path / "store", rank, [0, 3 - lost])
        return numbers.tolist()

    assert run_ranks(meet, 3, backend="gloo", lost=[lost])[3 - lost] == [5.0] * 3


def test_a_stage_tells_those_behind_it_though_the_next_one_is_gone(tmp_path):
    """Its first message, to the one that is gone, failed, and with it all that it had to say."""

    def tell(rank, world_size):
        group, edges = dist.group.WORLD, [Edge(1, 2), Edge(1, 0, True)]
        wire = Wire(group, [0, 1, 2], torch.device("cpu"))
        _let_go(rank, world_size, 2)
        if rank == 2:
            _die()
        if rank == 0:
            with pytest.raises(phalanx.PhalanxError) as caught:
                wire.receive_gradients(edges[1], [torch.zeros(1)])
            _live_on(tmp_path / "store", rank, [0, 1])
            return str(caught.value)
        _is_lost(group, 2)
        wire.tell_failure(edges, "stage 2 is gone", lost=False, leaves=True)
        _live_on(tmp_path / "store", rank, [0, 1])

    assert run_ranks(tell, 3, backend="gloo", lost=[2])[0] == "stage 2 is gone"
