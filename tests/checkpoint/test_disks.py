"""Disks that are full and folders that are another's: every rank hears of it, and nothing else has changed."""

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.checkpoint.sharded  # noqa: F401 - imported once, and not in every process that is forked
from phalanx.checkpoint import CheckpointManager
from phalanx.checkpoint.background import SaveWork, Saving
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
KINDS = (False, True)


def mount_small_disk(at, nbytes):
    """A file system of its own for this process and its children, or the reason why it cannot have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER) != 0:
        return f"mount namespaces are not permitted: {os.strerror(ctypes.get_errno())}"
    if user != 0:  # stays who he is in there: a disk takes no file of somebody whom its name space does not know
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if libc.mount(b"tmpfs", os.fsencode(at), b"tmpfs", 0, f"size={nbytes},mode=777".encode()) != 0:
        return f"mounts are not permitted: {os.strerror(ctypes.get_errno())}"
    return ""


def on_a_small_disk(act, folder, nbytes):
    """`act()` in a process for which `folder` is a disk of so many bytes."""

    def inside(rank, world_size):
        reason = mount_small_disk(folder, nbytes)
        return reason, None if reason else act()

    (reason, result), = run_ranks(inside, 1, backend=None)  # fmt: skip
    if reason:
        pytest.skip(reason)
    return result


def hidden(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.slow
def test_a_full_disk_is_told_on_every_rank_and_the_job_goes_on(tmp_path):
    def save(rank, world_size):
        told = []
        for sharded in KINDS:
            folder = tmp_path / str(sharded)
            manager = CheckpointManager(folder, sharded=sharded, max_failures=0)
            small = {"a": torch.full((40_000,), 1.0), "b": torch.full((40_000,), 2.0)}
            large = {name: torch.full((500_000,), float(rank)) for name in "abc"}
            manager.save(1, small)
            with pytest.raises(CheckpointError) as caught:
                manager.save(2, large)
            told.append(str(caught.value))
            manager.async_save(3, large)
            large["a"].fill_(9)
            with pytest.raises(CheckpointError) as caught:
                manager.async_save(4, small)
            told.append(str(caught.value))
            dist.barrier()  # rank 0 removes what was written
            assert hidden(folder) == []
            assert manager.load().step == 1
            assert large["a"].eq(9).all()
            assert large["b"].eq(rank).all()
            manager.save(5, small)
            assert [path.name for path in manager.checkpoints()] == ["00000002-step-5", "00000001-step-1"]
        return told

    first, second = on_a_small_disk(lambda: run_ranks(save, 2), tmp_path, 3 << 20)
    assert first == second
    for step, text in zip((2, 3, 2, 3), first, strict=True):
        assert f"step {step} to " in text
        assert ": No space left on device. Earlier checkpoints are unchanged, and so are" in text
        assert "Free space, or save to another disk." in text


def test_what_another_rank_writes_while_a_failed_save_is_removed_is_removed_too(tmp_path):
    """On a full disk a hidden folder stayed until the next save: it was not empty when it was to be removed."""
    folder = tmp_path / "draft"
    folder.mkdir()

    def write():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def discard():
        shutil.rmtree(folder, ignore_errors=True)

    saving = Saving(SaveWork(1, write, commit=lambda: folder, discard=discard), timeout_s=60)
    saving.start()
    assert saving.wait(60)
    folder.mkdir()  # another rank's part came between the removal of the files and of the folder
    (folder / "part").write_text("late")
    assert isinstance(saving.error, OSError)
    saving.abort()
    assert not folder.exists()


def test_a_folder_that_a_rank_may_not_write_to_or_enter_is_told_on_every_rank():
    """Asking whether a folder is there raised PermissionError on the one rank, and the others heard of a lost peer."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser can be somebody else")

    def save(rank, world_size, place):
        told = []
        for stranger, mode in ((0, 0o755), (1, 0o755), (1, 0o700)):
            folder = place / f"{stranger}-{mode}"
            manager = CheckpointManager(folder, sharded=True, max_failures=0)
            manager.save(1, {"w": torch.ones(4)})
            os.chmod(folder, mode)
            for call in (manager.save, manager.async_save):
                os.seteuid(65534 if rank == stranger else 0)
                try:
                    with pytest.raises(CheckpointError) as caught:
                        call(2, {"w": torch.ones(4)})
                finally:
                    os.seteuid(0)
                told.append(str(caught.value))
            assert manager.load().step == 1
            assert hidden(folder) == []
            dist.barrier()
        return told

    with tempfile.TemporaryDirectory() as place:  # not pytest's own, above which others may not look
        os.chmod(place, 0o755)
        first, second = run_ranks(save, 2, Path(place))
    assert first == second
    assert all("on rank 0: Permission denied. Earlier checkpoints" in text for text in first[:2])
    assert "Save to a folder that this user may write to." in first[0]
    assert all("rank 1 on " in text and " may not write to " in text for text in first[2:])
