"""Checkpoints at addresses of fsspec: the promises of a folder, held by a server of S3, and by other file systems."""

import json
import logging
import random
import re
import sys
import tempfile

import fsspec
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from tests.checkpoint.killed import assert_whole, die_after, state_of

import phalanx.checkpoint.sharded
from phalanx.checkpoint import CheckpointManager, inspect, load_checkpoint, save_checkpoint
from phalanx.cli.commands import group
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

pytest_plugins = ["tests.s3"]


def names_at(address):
    """What lies below an address, by the file system's own listing."""
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in files.find(root))


def alone(function, *args, **options):
    """Run in a process of its own: the threads and sockets of a file system end with it."""
    return run_ranks(lambda rank, world_size: function(*args), 1, backend=None, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_save_and_any_number_of_ranks_goes_on(s3, form, world_size, tmp_path, monkeypatch):
    folder = s3.new_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def save(rank, world_size):
        manager = CheckpointManager(folder, keep=2, sharded=form == "sharded")
        assert (manager.load(), manager.latest()) == (None, None)
        told = [manager.save(1, state_of(1, 1000))]
        for step in (2, 3):
            manager.async_save(step, state_of(step, 1000))
            told.append(manager.wait())
        assert manager.checkpoints() == [told[2], told[1]]
        assert manager.latest() == told[2]
        return told, names_at(folder)

    def load(rank, world_size):
        manager = CheckpointManager(folder)
        restored = manager.load()
        assert_whole(restored)
        assert_whole(manager.load(step=2))
        return restored.step, restored.path

    told, names = run_ranks(save, world_size)[0]
    assert [path.startswith(f"{folder}/0000000{number}-step-{number}-") for number, path in enumerate(told, 1)] == [
        True
    ] * 3
    folders = {name.partition("/")[0] for name in names}
    assert folders == {told[1].rpartition("/")[2], told[2].rpartition("/")[2], "latest"}
    assert not [name for name in names if ".writing" in name or ".part" in name]
    assert run_ranks(load, 3) == [(3, told[2])] * 3
    assert not list(tmp_path.glob("phalanx-*"))  # every rank but the first left an empty folder for each save


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_saver_killed_at_a_random_moment_leaves_the_one_before_whole(s3, tmp_path, form, how, kill):
    dice = random.Random(f"{form} {how} {kill}")
    size, delay = dice.choice([10, 500_000]), dice.random()
    folder, log = s3.new_folder(), tmp_path / "log"

    def save():
        manager = CheckpointManager(folder, keep=2, sharded=form == "sharded")
        with log.open("w", buffering=1) as file:
            for step in range(1, 1000):
                print("saving", step, file=file)
                if how == "save":
                    manager.save(step, state_of(step, size))
                else:
                    manager.async_save(step, state_of(step, size))
                    manager.wait()
                print("saved", step, file=file)
                if step == 2:
                    die_after(delay)

    def go_on():
        manager = CheckpointManager(folder, keep=2)
        restored = manager.load()
        assert_whole(restored)
        for entry in manager.checkpoints():
            step = int(entry.split("-step-")[1].partition("-")[0])
            assert_whole(manager.load(step=step))
        manager.save(restored.step + 1, state_of(0, 1))
        folders = {name.partition("/")[0] for name in names_at(folder)}
        assert len(folders) == 3, f"two checkpoints and latest, and nothing of the dead one: {folders}"
        return restored.step

    alone(save, lost=[0])
    lines = [line.split() for line in log.read_text().splitlines()]
    saving, saved = (max(int(step) for word, step in lines if word == said) for said in ("saving", "saved"))
    assert saved <= alone(go_on) <= saving


def test_what_fails_for_a_while_is_tried_again_and_told(s3, caplog):
    folder = s3.new_folder()

    def save():
        manager = CheckpointManager(folder, retry_s=60.0)
        manager.save(1, state_of(1, 10))
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: (told.append(record.getMessage()), s3.mend())  # mended when the failure is told
        logging.getLogger("phalanx").addHandler(handler)
        s3.cut_now()
        manager.async_save(2, state_of(2, 10))
        manager.wait()
        assert_whole(manager.load())
        return told, manager.load().step

    told, step = alone(save)
    assert step == 2
    assert len(told) == 2, told
    left_s = re.search(r"Retrying for up to (\d+) s\.", told[0])
    assert left_s is not None, told[0]
    assert int(left_s[1]) <= 60
    assert folder in told[0]
    assert "succeeded after" in told[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_what_fails_for_longer_is_an_error_on_every_rank_and_changes_nothing(s3, how):
    folder = s3.new_folder()

    def save(rank, world_size):
        manager = CheckpointManager(folder, sharded=True, retry_s=0.5, max_failures=0)
        manager.save(1, state_of(1, 10))
        dist.barrier()
        if rank == 0:
            s3.cut_now()
        dist.barrier()
        with pytest.raises(CheckpointError, match=rf"step 2 to {folder} on rank 0: .*checkpoints are unchanged"):
            manager.save(2, state_of(2, 10)) if how == "save" else manager.async_save(2, state_of(2, 10))
        with pytest.raises(CheckpointError, match=rf"CheckpointManager.load on rank 0: {folder}: "):
            manager.load()
        dist.barrier()
        if rank == 0:
            s3.mend()
        dist.barrier()
        assert_whole(manager.load())
        manager.save(3, state_of(3, 10))
        return manager.load().step

    assert run_ranks(save, 2) == [3, 3]


def test_a_bucket_that_is_not_there_is_told_at_once(s3):
    """It was not tried again: the time for that is longer than the test may take."""

    def save():
        with pytest.raises(CheckpointError, match=r"s3://nobody/a on rank 0: The specified bucket does not exist"):
            CheckpointManager("s3://nobody/a", retry_s=10_000.0, max_failures=0).save(1, {"a": 1})

    alone(save)


def test_a_damaged_object_is_named_and_the_one_before_is_taken_if_wished(s3):
    folder = s3.new_folder()

    def damage():
        manager = CheckpointManager(folder)
        manager.save(1, state_of(1, 100))
        path = manager.save(2, state_of(2, 100))
        files, key = fsspec.core.url_to_fs(f"{path}/state.pt")
        content = bytearray(files.cat_file(key))
        content[len(content) // 2] ^= 1
        files.pipe_file(key, bytes(content))
        with pytest.raises(CheckpointError, match=rf"{path}/state.pt does not match its checksum.*fallback=True"):
            manager.load()
        with pytest.warns(UserWarning, match="Loading the previous one"):
            assert_whole(manager.load(fallback=True))
        files.rm(key)
        with pytest.raises(CheckpointError, match=rf"load: {path} lacks a file.*fallback=True"):
            manager.load()
        with pytest.warns(UserWarning, match="lacks a file.*Loading the previous one"):
            assert_whole(manager.load(fallback=True))

    alone(damage)


def test_what_a_living_writer_has_put_there_is_left_alone(s3):
    """A writer of another host cannot be seen: what it has put there within the hour stays; an old one's goes."""
    folder = s3.new_folder()

    def save():
        files, root = fsspec.core.url_to_fs(folder)
        theirs = "00000001-step-1-0123abcd"
        own = json.dumps({"host": "another", "process": {"pid": 1, "birth": 1}})
        files.pipe_file(f"{root}/{theirs}/.writing", own.encode())
        files.pipe_file(f"{root}/{theirs}/state.pt", b"half")
        CheckpointManager(folder).save(2, {"a": 1})
        kept = [name for name in names_at(folder) if name.startswith(theirs)]
        phalanx.checkpoint.remote_history._ABANDONED_S = -1.0
        CheckpointManager(folder).save(3, {"a": 1})
        return kept, [name for name in names_at(folder) if name.startswith(theirs)]

    kept, left = alone(save)
    assert len(kept) == 2
    assert left == []


@pytest.mark.slow
def test_single_files_are_saved_loaded_and_shown(s3):
    address = f"{s3.new_folder()}/run.pt"

    def work():
        save_checkpoint(address, {"w": torch.ones(3), "epoch": 4})
        model = torch.nn.Linear(2, 1)
        manager = CheckpointManager(address.rpartition("/")[0])
        manager.save(7, {"old": 1})
        path = manager.save(9, {"model": model})
        shown = inspect(path, verify=True)
        assert (shown.step, shown.path, shown.damage, len(shown.items)) == (9, path, (), 2)
        other = torch.nn.Linear(2, 1)
        load_checkpoint(path, into={"model": other})
        assert torch.equal(other.weight, model.weight)
        assert load_checkpoint(manager.folder)["model"].keys() == model.state_dict().keys()
        assert load_checkpoint(address)["epoch"] == 4
        with pytest.raises(CheckpointError, match=r"load_checkpoint: s3://runs/nothing: there is no checkpoint there"):
            load_checkpoint("s3://runs/nothing")
        results = [
            CliRunner().invoke(group, ["checkpoint", "inspect", *words])
            for words in ([manager.folder, "--verify"], [address], ["s3://runs/nothing"])
        ]
        return [(result.exit_code, result.output) for result in results]

    (code, output), (code_of_file, output_of_file), (code_of_none, output_of_none) = alone(work)
    assert (code, code_of_file, code_of_none) == (0, 0, 1)
    assert "model.weight\tfloat32\t1 × 2\t8 B" in output.splitlines()  # noqa: RUF001
    assert "all checksums match, older ones: 00000001-step-7-" in output.splitlines()[-1]
    assert "epoch\t4" in output_of_file.splitlines()
    assert output_of_none == "inspect: s3://runs/nothing: there is no checkpoint there.\n"


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_file_system_in_memory_keeps_them_too(form):
    """Any of fsspec's: what is asked of it is to put, list, get and remove."""

    def work():
        manager = CheckpointManager("memory://runs/a", keep=2, sharded=form == "sharded")
        for step in range(1, 5):
            manager.async_save(step, state_of(step, 10))
        manager.wait()
        assert_whole(manager.load())
        assert_whole(manager.load(step=3))
        return len(manager.checkpoints()), inspect("memory://runs/a").step

    assert alone(work) == (2, 4)


def test_files_of_this_machine_may_be_named_as_addresses(tmp_path):
    manager = CheckpointManager(f"file://{tmp_path}/run")
    assert manager.save(1, {"a": 1}) == tmp_path / "run" / "00000001-step-1"
    assert load_checkpoint(f"file://{tmp_path}/run") == {"a": 1}


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_before_training_begins(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'phalanx\[s3\]'"):
        CheckpointManager("s3://bucket/a")
