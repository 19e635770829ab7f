"""A checkpoint appears whole or not at all, and every rank hears how it went."""

import errno
import os
import pathlib
import pickle
import resource
import zipfile

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.checkpoint.atomic import replace_file
from phalanx.errors import CheckpointError, MismatchError
from phalanx.testing import run_ranks

STATE = {"model": {"weight": torch.arange(1000.0)}, "epoch": 3, "name": "run", "best": [0.5, None], "shape": (2, 3)}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert torch.equal(left["model"]["weight"], right["model"]["weight"])
    assert {name: left[name] for name in left if name != "model"} == {
        name: right[name] for name in right if name != "model"
    }


def test_what_was_saved_comes_back(tmp_path):
    save_checkpoint(tmp_path / "run.pt", STATE)
    assert_same(load_checkpoint(tmp_path / "run.pt"), STATE)
    assert os.listdir(tmp_path) == ["run.pt"]


@on_ranks(1, backend=None)
def test_an_optimizer_goes_on_from_its_checkpoint(tmp_path):
    # In a process of its own: torch's optimizers bring in its compiler, which sets environment variables.
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "run.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    other.load_state_dict(load_checkpoint(tmp_path / "run.pt")["optimizer"])
    assert other.state_dict()["state"][0]["step"].item() == 1.0


def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    save_checkpoint(tmp_path / "run.pt", {})
    (tmp_path / "plain").touch()
    assert (tmp_path / "run.pt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest.pt").symlink_to(tmp_path / "disk" / "run.pt")
    save_checkpoint(tmp_path / "latest.pt", {"epoch": 1})
    save_checkpoint(tmp_path / "latest.pt", {"epoch": 2})
    assert (tmp_path / "latest.pt").is_symlink()
    assert load_checkpoint(tmp_path / "disk" / "run.pt") == {"epoch": 2}


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"

    replace_file(path, write)
    assert path.read_bytes() == b"new"


def test_an_interrupt_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, write)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


# --- what cannot be written --------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_a_file_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    for path, told in (
        ("no/run.pt", r"no/run.pt on rank 0: No such file.*Nothing was written. Create the folder"),
        ("", r"on rank 0: Is a directory.*Give the checkpoint a file name"),
        ("file/run.pt", r"Not a directory.*A part of the path is a file"),
    ):
        with pytest.raises(CheckpointError, match=told):
            save_checkpoint(tmp_path / path, STATE)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pathlib.PurePosixPath("x"), r"holds objects of pathlib.PurePosixPath, which load_checkpoint would refuse"),
        (lambda: None, r"on rank 0: \w+Error: Can't pickle.*Save only what torch.save can"),
    ],
)
def test_a_state_that_could_not_be_read_again_is_refused_now(tmp_path, value, message):
    save_checkpoint(tmp_path / "run.pt", STATE)
    with pytest.raises(CheckpointError, match=message) as caught:
        save_checkpoint(tmp_path / "run.pt", {"value": value})
    assert "The previous checkpoint is unchanged." in str(caught.value)
    assert_same(load_checkpoint(tmp_path / "run.pt"), STATE)
    assert os.listdir(tmp_path) == ["run.pt"]


def with_full_disk(action):
    """Do it with a limit on the size of files, for which the kernel refuses a write as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        return action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("numbers", [6_000, 1_000_000])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, numbers):
    save_checkpoint(tmp_path / "run.pt", STATE)
    with pytest.raises(
        CheckpointError, match=r"File too large\. The previous checkpoint is unchanged\. Free space"
    ) as caught:
        with_full_disk(lambda: save_checkpoint(tmp_path / "run.pt", {"weight": torch.zeros(numbers)}))
    assert caught.value.__cause__ is not None
    assert_same(load_checkpoint(tmp_path / "run.pt"), STATE)
    assert os.listdir(tmp_path) == ["run.pt"]


# --- with other ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks(backend="gloo")
def test_rank_0_writes_and_the_others_see_it(rank, world_size, tmp_path):
    save_checkpoint(tmp_path / "run.pt", {"rank": rank})
    assert (load_checkpoint(tmp_path / "run.pt"), os.listdir(tmp_path)) == ({"rank": 0}, ["run.pt"])


def test_every_rank_hears_of_a_full_disk_and_the_job_can_go_on(tmp_path):
    def save(rank, world_size):
        save_checkpoint(tmp_path / "run.pt", {"epoch": 1})
        try:
            with_full_disk(lambda: save_checkpoint(tmp_path / "run.pt", {"weight": torch.zeros(10**5)}))
        except CheckpointError as error:
            message = str(error)
        total = torch.ones(1)
        dist.all_reduce(total)
        return message, load_checkpoint(tmp_path / "run.pt"), os.listdir(tmp_path), total.item()

    first, second = run_ranks(save, 2, backend="gloo")
    assert first == second
    assert "on rank 0: File too large" in first[0]
    assert first[1:] == ({"epoch": 1}, ["run.pt"], 2.0)


def test_every_rank_hears_that_rank_0_may_not_write(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)

    def save(rank, world_size):
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # permissions do not bind the superuser
        try:
            save_checkpoint(tmp_path / "locked" / "run.pt", STATE)
        except CheckpointError as error:
            return str(error)
        finally:
            os.seteuid(user)

    for folder in [tmp_path, *tmp_path.parents[:2]]:
        folder.chmod(0o755)
    for message in run_ranks(save, 2, backend="gloo"):
        assert f"on rank 0: {os.strerror(errno.EACCES)}. Nothing was written. Save to a folder that" in message


@on_ranks(2, backend="gloo")
def test_a_path_that_is_none_is_an_error_on_every_rank():
    """It was raised twice on rank 0, and the others waited for word of it."""
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike"):
        save_checkpoint(None, {})
    dist.barrier()


def test_a_call_on_rank_0_alone_is_told_as_one(tmp_path):
    """It showed as a mismatch of broadcasts: nothing said that save_checkpoint is collective."""

    def save(rank, world_size):
        def step():
            if rank == 0:
                save_checkpoint(tmp_path / "run.pt", {"epoch": 1})
            dist.all_reduce(torch.ones(1))

        with pytest.raises(MismatchError) as caught:
            step()
        return str(caught.value), type(caught.value).__name__, sorted(caught.value.calls)

    messages = run_ranks(save, 2)
    for message, name, calls in messages:
        assert "rank 0: broadcast(src=0) of int64 (1,) at save_checkpoint in " in message
        assert "test_checkpoint.py:" in message
        assert (name, calls) == ("MismatchError", [0, 1])
    assert messages[0][0].endswith(
        "\nsave_checkpoint is collective: every rank must call it, at the same step. Call it on every "
        "rank, not under `if rank == 0`."
    )
    assert load_checkpoint(tmp_path / "run.pt") == {"epoch": 1}


# --- what cannot be read -----------------------------------------------------------------------------------------


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"load_checkpoint: .*run.pt could not be read: No such file"):
        load_checkpoint(tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="is a directory without a checkpoint"):
        load_checkpoint(tmp_path)


def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, STATE)
    whole = path.read_bytes()
    for size in (4, 5, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"run.pt is cut off after {size} bytes"):
            load_checkpoint(path)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    for content, message in [
        (b"", "is empty"),
        (b"PK", "begins with b'PK'"),
        (b"# notes", "begins with b'# no'"),
        (pickle.dumps({"epoch": 1}), "begins with"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "no checkpoint")
    with pytest.raises(CheckpointError, match="not a checkpoint that can be opened safely"):
        load_checkpoint(path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_a_file_from_a_stranger_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"trap": Trap()}, "run.pt")
    with pytest.raises(CheckpointError, match=r"opened safely: .*mkdir"):
        load_checkpoint("run.pt")
    assert os.listdir() == ["run.pt"]
