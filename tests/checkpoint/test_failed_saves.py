"""A save that fails is reported at once, training continues, and the next save is attempted; too many end it."""

import logging
import threading

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

import phalanx.checkpoint.sharded  # noqa: F401 - imported once, and not in every process that is forked
from phalanx.checkpoint import CheckpointManager, background, save_work
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
HOW = pytest.mark.parametrize("how", ["save", "async_save"])


class Lines(logging.Handler):
    """Return what was logged, and an event for the first line."""

    def __init__(self):
        super().__init__()
        self.texts, self.came = [], threading.Event()
        logging.getLogger("phalanx").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.came.set()


def block(folder, number, step):
    """Let the save of `step`, the `number`-th, fail: no folder can have its name while a file has it."""
    (folder / f"{number:08d}-step-{step}").write_text("in the way")


def unblock(folder, number, step):
    (folder / f"{number:08d}-step-{step}").unlink()


def steps(manager):
    return [int(path.name.rpartition("-")[2]) for path in manager.checkpoints()]


def state_of(step):
    return {"w": torch.full((3,), float(step)), "v": torch.ones(2)}


@pytest.mark.slow(but=("save-whole", "async_save-sharded"))
@KINDS
@HOW
def test_of_steps_1_to_5_with_only_2_failing_the_others_are_saved(tmp_path, sharded, how):
    """Only 1, 4 and 5 were: the failure of 2 was raised by the save of 3, which was not even begun."""

    def train(rank, world_size):
        lines = Lines()
        manager = CheckpointManager(tmp_path, keep=None, sharded=sharded)
        for step in range(1, 6):
            if rank == 0 and step == 2:
                block(tmp_path, 2, 2)
            dist.barrier()
            path = getattr(manager, how)(step, state_of(step))
            assert how == "async_save" or (path is None) == (step == 2)
            if step == 2 and rank == 0:
                assert lines.came.wait(60), "the failure is reported without another call"
                unblock(tmp_path, 2, 2)
            dist.barrier()
        assert how == "save" or manager.wait() == manager.latest()
        assert manager.wait() is None
        return steps(manager), lines.texts

    (found, told), (theirs, nothing) = run_ranks(train, 2)
    assert found == theirs == [5, 4, 3, 1]
    assert nothing == []
    (text,) = told
    assert f"CheckpointManager.{how}: step 2 to {tmp_path} on rank 0: Not a directory" in text
    assert "unchanged, and so are the objects in training. The newest is 00000001-step-1." in text
    assert "Training continues, and the next save is attempted as usual; up to 3 saves in a row may fail (max" in text


@pytest.mark.slow(but=("save-whole", "async_save-sharded"))
@KINDS
@HOW
@on_ranks(2)
def test_more_failures_in_a_row_than_are_allowed_end_the_training_on_every_rank(rank, tmp_path, sharded, how):
    Lines()
    manager = CheckpointManager(tmp_path, sharded=sharded, max_failures=2)
    save = getattr(manager, how)
    for step in (1, 2):  # one failure between saves that succeed does not count
        save(step, state_of(step))
    manager.wait()
    dist.barrier()
    if rank == 0:
        block(tmp_path, 3, 3)
    dist.barrier()
    done = []

    def save_on():
        while len(done) < 9:
            save(3, state_of(3))
            done.append(0)

    with pytest.raises(CheckpointError, match=r"Not a directory.* 3 saves in a row have failed \(max_failures=2\)"):
        save_on()
    dist.barrier()
    if rank == 0:
        unblock(tmp_path, 3, 3)
    dist.barrier()
    save(4, state_of(4))  # a loop that catches the error may go on
    assert manager.wait() in (None, manager.latest())
    assert (len(done), steps(manager)) == (2 if how == "save" else 3, [4, 2, 1])


@KINDS
def test_the_last_save_of_a_training_is_raised_when_it_failed_and_only_then(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, state_of(1))
    block(tmp_path, 2, 2)
    assert manager.save(2, state_of(2)) is None
    with pytest.raises(CheckpointError, match=r"step 2 to .*Not a directory.*The newest is 00000001-step-1"):
        manager.wait()
    assert manager.wait() is None
    manager.async_save(2, state_of(2))
    with pytest.raises(CheckpointError, match=r"step 2 to .*Not a directory"):
        manager.close()
    assert manager.saved_step == 1


def test_a_folder_that_cannot_be_made_is_a_failure_that_is_allowed_as_well(tmp_path):
    lines = Lines()
    (tmp_path / "file").touch()
    manager = CheckpointManager(tmp_path / "file" / "run")
    manager.async_save(1, state_of(1))
    assert "on rank 0: Not a directory" in lines.texts[0]
    (tmp_path / "file").unlink()
    manager.async_save(2, state_of(2))
    assert manager.wait().name == "00000001-step-2"


@HOW
def test_a_folder_that_is_a_file_is_an_error_at_the_first_save(tmp_path, how):
    """`save` returned None, as on a full disk: the training ran on, and its first saves were lost."""
    (tmp_path / "file").touch()
    manager = CheckpointManager(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"File exists\..* Pass the path of a folder, not of a file\.$"):
        getattr(manager, how)(1, state_of(1))


def test_what_can_never_be_saved_is_raised_at_once(tmp_path):
    manager = CheckpointManager(tmp_path)
    for state in ({"out": tmp_path}, {"call": lambda: None}):
        with pytest.raises(CheckpointError):
            manager.save(1, state)


def test_a_save_that_takes_longer_than_the_timeout_of_the_group_is_named_and_waited_for(tmp_path, monkeypatch):
    """The other ranks waited in a collective: "all_gather #7: no answer from rank 0 within 3.0 s"."""
    write_whole = save_work.write_whole
    monkeypatch.setattr(background, "_SYNC_EVERY_S", 0.01)
    monkeypatch.setattr(background, "_WARN_S", 0.0)

    def train(rank, world_size):
        lines = Lines()
        monkeypatch.setattr(
            save_work, "write_whole", lambda *args: [lines.came.wait(60), write_whole(*args)][1]
        )  # rank 0 writes when it was reported that the ranks wait
        manager = CheckpointManager(tmp_path, sharded=False)
        manager.async_save(20, state_of(20))
        manager.async_save(40, state_of(40))
        manager.wait()
        return lines.texts

    told, nothing = run_ranks(train, 2)
    assert nothing == []
    assert told[0].startswith(
        "CheckpointManager.async_save: training waits for the checkpoint of step 20, which rank 0 still writes, for 0 s"
    )


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None])
def test_a_number_of_failures_that_makes_no_sense_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="max_failures must be 0 or more saves"):
        CheckpointManager(tmp_path, max_failures=wrong)
