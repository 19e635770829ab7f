"""Whoever is killed while it saves, whenever: the latest checkpoint is whole, and nothing of the dead one stays."""

import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.killed import assert_whole, die_after, state_of
from tests.on_ranks import on_ranks

import phalanx.checkpoint.sharded
from phalanx.checkpoint import CheckpointManager
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.testing import run_ranks


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_saver_killed_at_a_random_moment_leaves_the_latest_whole(tmp_path, form, how, kill):
    dice = random.Random(f"{form} {how} {kill}")
    size, delay = dice.choice([10, 20_000, 500_000]), dice.random() * 0.1
    folder, log = tmp_path / "run", tmp_path / "log"

    def save(rank, world_size):
        manager = CheckpointManager(folder, keep=2, sharded=form == "sharded")
        with log.open("w", buffering=1) as file:
            step = 0
            while True:
                step += 1
                print("saving", step, file=file)
                state = state_of(step, size)
                if how == "save":
                    manager.save(step, state)
                else:
                    manager.async_save(step, state)
                    state["w"].zero_()
                    manager.wait()
                print("saved", step, file=file)
                if step == 3:
                    die_after(delay)

    run_ranks(save, 1, backend=None, lost=[0])
    lines = [line.split() for line in log.read_text().splitlines()]
    saving, saved = (max(int(step) for word, step in lines if word == said) for said in ("saving", "saved"))
    manager = CheckpointManager(folder, keep=2)
    restored = manager.load()
    assert saved <= restored.step <= saving
    assert_whole(restored)
    steps = [int(path.name.rpartition("-")[2]) for path in manager.checkpoints()]
    assert 2 <= len(steps) <= 3, "before it removes the oldest there is one more"
    for step in steps:
        assert_whole(manager.load(step=step))
    manager.save(restored.step + 1, {"step": 0})
    names = sorted(os.listdir(folder))
    assert len(names) == 3, names
    assert names[-1] == "latest"
    assert not [name for name in names if name.startswith(".")], "what the dead one left is gone"


def test_a_rank_killed_while_ranks_save_leaves_the_latest_whole_and_the_others_go_on(tmp_path, kill):
    dice = random.Random(kill)
    victim, delay = dice.randrange(2), dice.random() * 0.1

    def save(rank, world_size):
        manager = CheckpointManager(tmp_path, sharded=True)
        step = 0

        def train():
            nonlocal step
            while True:
                step += 1
                manager.async_save(step, state_of(step, 100_000))
                dist.barrier()  # a step of training
                if rank == victim and step == 3:
                    die_after(delay)

        with pytest.raises(PhalanxError):
            train()
        # As after a regroup: what waits for the dead one's part must not be waited for.
        dist.destroy_process_group()
        manager.async_save(1000, state_of(1000, 5))
        assert manager.wait().name.endswith("-step-1000")
        return step

    reached = run_ranks(save, 2, lost=[victim])[1 - victim]
    manager = CheckpointManager(tmp_path)
    steps = [int(path.name.rpartition("-")[2]) for path in manager.checkpoints()]
    assert steps[0] == 1000
    assert len(steps) > 1
    assert all(step <= reached for step in steps[1:])
    for step in steps:
        assert_whole(manager.load(step=step))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_save_after_a_loss_does_not_wait_for_the_part_of_the_lost_rank(tmp_path):
    def save(rank, world_size):
        manager = CheckpointManager(tmp_path, sharded=True, timeout=0.5)
        if rank == 1:
            phalanx.checkpoint.history.Draft.report = lambda *_: None
        manager.async_save(1, state_of(1, 5))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PhalanxError):
            dist.barrier()
        dist.destroy_process_group()
        manager.async_save(2, state_of(2, 5))
        return manager.wait().name

    assert run_ranks(save, 2, lost=[1])[0] == "00000001-step-2"
    assert sorted(os.listdir(tmp_path)) == ["00000001-step-2", "latest"]


@on_ranks(2)
def test_a_save_is_finished_after_its_group_was_destroyed(rank, tmp_path):
    manager = CheckpointManager(tmp_path, sharded=True)
    manager.async_save(1, state_of(1, 500_000))
    dist.destroy_process_group()
    path = manager.wait()
    assert (path is None) == (rank == 1)
    if rank == 0:
        assert_whole(manager.load())


@on_ranks(2)
def test_a_part_that_does_not_come_is_told_and_the_checkpoint_is_given_up(rank, tmp_path):
    """Rank 0 must not wait for ever for the part of a rank whose disk hangs."""
    manager = CheckpointManager(tmp_path, sharded=True, timeout=0.2, max_failures=0)
    state = {"w": torch.ones(3), "v": torch.ones(3)}
    manager.save(1, state)
    if rank == 1:  # it says that it has written its part, and nobody finds it
        phalanx.checkpoint.history.Draft.report = lambda *_: None
    with pytest.raises(CheckpointError, match=r"step 2 to .*: \.part-1 was not written within 0.2 s"):
        manager.save(2, state)
    assert sorted(os.listdir(tmp_path)) == ["00000001-step-1", "latest"]


def test_a_manager_goes_on_in_the_group_that_survivors_form(tmp_path):
    """The plan of who writes what was kept for the next save of these shapes: fewer ranks left parts out."""

    def save(rank, world_size):
        manager = CheckpointManager(tmp_path / "run", sharded=True)
        state = {name: torch.full((1000,), float(number)) for number, name in enumerate("abcdef")}
        manager.async_save(1, state)
        manager.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PhalanxError):
            dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("phalanx", store=store, rank=min(rank, 1), world_size=2)
        manager.async_save(2, state)
        manager.wait()
        manager.save(3, state)
        return {name: float(tensor.sum()) for name, tensor in manager.load().state.items()}

    found = run_ranks(save, 3, lost=[1])
    assert found[0] == found[2] == {name: 1000.0 * number for number, name in enumerate("abcdef")}


def test_a_reader_beside_a_job_that_saves_and_removes_reads_whole_ones_only(tmp_path):
    """With keep=1 the latest is removed as soon as there is another: the reader was told of a damaged file."""
    folder, enough = tmp_path / "run", tmp_path / "enough"

    def act(rank, world_size):
        manager = CheckpointManager(folder, keep=1, sharded=True)
        if rank == 0:
            step = 0
            while not enough.exists():
                step += 1
                manager.save(step, state_of(step, 20_000))
            return step
        read, count = 0, 0
        try:
            while count < 30:
                if (restored := manager.load()) is not None:
                    assert_whole(restored)
                    assert restored.step >= read
                    read, count = restored.step, count + 1
        finally:
            enough.touch()
        return read

    # Two jobs: no group.
    saved, read = run_ranks(act, 2, backend=None, init=False)
    assert read <= saved
