"""A file appears whole or not at all, whatever its name leads to and whenever the writer dies.

As root, `save_checkpoint("/dev/null", ...)` renamed its draft over the device and destroyed it for the whole machine.
Of 22 processes that got SIGTERM while they saved, 12 left a `.partial` file as large as the checkpoint, and nothing
ever removed it.
"""

import errno
import os
import re
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.checkpoint.atomic import remove_abandoned, replace_file
from phalanx.errors import CheckpointError

# Python 3.12 warns of torch's native threads; none is used in the children here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
OLD, NEW = b"old" * 1000, b"new" * 1000


@pytest.fixture(params=["without a name", "hidden"])
def kind(request, monkeypatch):
    """Both ways to write: file systems without anonymous files get the other."""
    if request.param == "hidden":
        monkeypatch.delattr(os, "O_TMPFILE")
    return request.param


def make_device(path, major, minor, kind=stat.S_IFCHR):
    """A device of our own: the machine's must not be in danger, whatever the code under test does."""
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("only root may make a device")


def test_the_null_device_stays_one(tmp_path):
    path = tmp_path / "null"
    make_device(path, 1, 3)
    (tmp_path / "link").symlink_to(path)
    for name in ("null", "link"):
        save_checkpoint(tmp_path / name, {"epoch": 1})
        assert stat.S_ISCHR(path.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "null"]


def test_a_device_that_is_full_says_so_and_stays(tmp_path):
    path = tmp_path / "full"
    make_device(path, 1, 7)
    with pytest.raises(CheckpointError, match=r"full on rank 0: No space left on device\. Nothing was written\."):
        save_checkpoint(path, {"epoch": 1})
    assert stat.S_ISCHR(path.stat().st_mode)


def test_a_disk_is_refused_by_name_and_not_opened(tmp_path):
    path = tmp_path / "disk"
    make_device(path, 7, 250, stat.S_IFBLK)
    with pytest.raises(CheckpointError, match=r"disk on rank 0: it is a disk \(a block device\), not a file\. Nothing"):
        save_checkpoint(path, {"epoch": 1})
    assert stat.S_ISBLK(path.stat().st_mode)


def test_a_pipe_gets_the_checkpoint_and_stays_one(tmp_path):
    pipe, copy = tmp_path / "pipe", tmp_path / "copy"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match=r"pipe on rank 0: it is a pipe that nobody reads\. Nothing was written"):
        save_checkpoint(pipe, {"epoch": 1})
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def drain():
        with open(reader, "rb") as source:
            copy.write_bytes(source.read())

    keep = os.open(pipe, os.O_WRONLY)  # until the checkpoint is on its way, the reader would find an end
    thread = threading.Thread(target=drain)
    thread.start()
    save_checkpoint(pipe, {"epoch": 3, "bytes": "x" * 200_000})  # more than a pipe holds
    os.close(keep)
    thread.join()
    assert load_checkpoint(copy)["epoch"] == 3
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_links_that_lead_in_a_circle_are_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"a on rank 0: Too many levels of symbolic links"):
        save_checkpoint(tmp_path / "a", {})
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_names_as_long_as_the_file_system_takes(tmp_path, kind):
    name = "ä" * 120 + ".pt"
    replace_file(tmp_path / name, lambda file: file.write(NEW))
    assert (tmp_path / name).read_bytes() == NEW
    with pytest.raises(
        CheckpointError, match=r"on rank 0: File name too long\. Nothing was written\. Give the checkpoint"
    ):
        save_checkpoint(tmp_path / ("x" * 300), {})


def test_a_link_to_nothing_makes_what_it_points_to(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "run.pt")
    save_checkpoint(tmp_path / "latest", {"epoch": 1})
    assert load_checkpoint(tmp_path / "disk" / "run.pt") == {"epoch": 1}
    assert (tmp_path / "latest").is_symlink()


def test_a_folder_that_may_be_written_and_not_listed_is_enough():
    with tempfile.TemporaryDirectory() as place:  # not below pytest's own folders, which are closed to others
        folder = Path(place)
        folder.chmod(0o300)
        if (user := os.geteuid()) == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)  # permissions do not bind the superuser
        try:
            replace_file(folder / "file", lambda file: file.write(NEW))
        finally:
            os.seteuid(user)
            folder.chmod(0o700)
        assert (folder / "file").read_bytes() == NEW


# --- a writer that dies ------------------------------------------------------------------------------------------


def die_while(path, act):
    """Write to `path` in a process of its own, which `act(file)` ends in the middle; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            replace_file(path, act)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_writer_that_is_killed_leaves_the_old_file_and_at_most_what_the_next_one_removes(tmp_path, kind, signum):
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def half(file):
        file.write(NEW)
        file.flush()
        os.kill(os.getpid(), signum)

    assert die_while(path, half) == -signum
    assert path.read_bytes() == OLD
    left = set(os.listdir(tmp_path)) - {"file"}
    if kind == "without a name":
        assert left == set()
    else:
        assert len(left) == 1
        assert re.fullmatch(r"\.file\.[0-9a-f]{8}\.partial", left.pop())
    replace_file(tmp_path / "other", lambda file: file.write(NEW))  # not even the same name
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_a_writer_that_is_killed_just_before_the_new_name_leaves_what_the_next_one_removes(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert die_while(path, lambda file: file.write(NEW)) == -signal.SIGTERM
    assert path.read_bytes() == OLD
    assert len(os.listdir(tmp_path)) == 2
    replace_file(path, lambda file: file.write(NEW))
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_living_process_is_writing_is_not_removed(tmp_path, monkeypatch):
    path = tmp_path / "file"
    monkeypatch.delattr(os, "O_TMPFILE")
    (at_half, tell_half), (go_on, tell_go_on) = os.pipe(), os.pipe()

    def slowly(file):
        file.write(OLD[:10])
        file.flush()
        os.write(tell_half, b".")
        os.read(go_on, 1)
        file.write(OLD[10:])

    pid = os.fork()
    if pid == 0:
        replace_file(path, slowly)
        os._exit(0)
    os.read(at_half, 1)
    replace_file(path, lambda file: file.write(NEW))
    assert len(os.listdir(tmp_path)) == 2
    assert path.read_bytes() == NEW
    os.write(tell_go_on, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]
    for fd in (at_half, tell_half, go_on, tell_go_on):
        os.close(fd)


def test_files_that_are_not_ours_are_left_alone(tmp_path):
    names = [
        ".partial",
        "run.pt.partial",
        ".run.pt.12345678.partial~",
        ".run.pt.1234567.partial",
        ".a.GGGGGGGG.partial",
    ]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".folder.12345678.partial").mkdir()
    (tmp_path / ".link.12345678.partial").symlink_to(tmp_path / "run.pt.partial")
    remove_abandoned(tmp_path)
    assert len(os.listdir(tmp_path)) == len(names) + 2
    remove_abandoned(tmp_path / "not there")


def test_what_is_written_is_written_once(tmp_path, kind):
    """Naming the anonymous file failed every time, and all was written again under a hidden name."""
    calls = []

    def write(file):
        calls.append(file.name)
        file.write(NEW)

    replace_file(tmp_path / "file", write)
    replace_file(tmp_path / "file", write)
    assert len(calls) == 2
    assert (tmp_path / "file").read_bytes() == NEW


def test_a_file_system_that_refuses_nameless_files_gets_hidden_ones(tmp_path, monkeypatch):
    calls = []

    def refuse(*_args, **_kwargs):
        calls.append("link")
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    replace_file(tmp_path / "file", lambda file: file.write(NEW))
    assert (tmp_path / "file").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]
    assert calls == ["link"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_synchronised_is_an_error_only_if_the_disk_failed(tmp_path, monkeypatch, code):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    if code == errno.EIO:
        with pytest.raises(CheckpointError, match="The new checkpoint is in place, but a power failure may destroy it"):
            save_checkpoint(tmp_path / "file", {})
    else:
        save_checkpoint(tmp_path / "file", {})
    assert load_checkpoint(tmp_path / "file") == {}


def test_a_file_keeps_its_mode(tmp_path):
    """A private checkpoint was readable by all after the second save."""
    path = tmp_path / "run.pt"
    for mode in (0o600, 0o664):
        save_checkpoint(path, {"a": 1})
        path.chmod(mode)
        save_checkpoint(path, {"a": 2})
        assert stat.S_IMODE(path.stat().st_mode) == mode
