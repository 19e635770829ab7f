import os
import stat
import tempfile
from pathlib import Path

import pytest

from phalanx._base.ipc import private
from phalanx._job.agent.folder import JobFolder, remove


def entries(folder: Path) -> set[str]:
    return {str(path) for path in folder.iterdir()}


def test_a_folder_is_private_short_and_gone_at_the_end(tmp_path: Path) -> None:
    folder = JobFolder({"TMPDIR": str(tmp_path)})
    assert entries(tmp_path) == {folder.path}
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert len(os.path.basename(folder.path)) == len("pymp-12345678")
    Path(folder.path, "inner").mkdir()
    Path(folder.path, "inner", "socket").touch()
    folder.close()
    assert entries(tmp_path) == set()
    folder.close()
    remove(folder.path)
    remove("")


def test_where_no_folder_can_be_made_the_next_place_is_taken(tmp_path: Path) -> None:
    folder = JobFolder({"TMPDIR": str(tmp_path / "missing"), "TMP": str(tmp_path)})
    assert entries(tmp_path) == {folder.path}
    folder.close()


def test_the_folders_of_dead_jobs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    living, dead = JobFolder(environ), JobFolder(environ)
    Path(dead.path, "listener-x").touch()
    os.close(dead._lock)  # as the kernel does when a job is killed, also in its first second
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "phalanx-00000").symlink_to(precious)
    (tmp_path / "phalanx-00001").touch()
    (tmp_path / "phalanx-longer").mkdir()
    (tmp_path / "phalanx-users").mkdir()  # as long as ours
    kept = entries(tmp_path) - {dead.path}
    ours = JobFolder(environ)
    ours.remove_others()
    assert entries(tmp_path) == kept | {ours.path}
    ours.close()
    living.close()


def test_the_sockets_of_a_rank_are_made_in_the_folder_that_the_agent_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket has a name while it is made: ranks that were killed in that moment left folders in TMPDIR."""
    made: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **words: made.append(words["dir"]) or make(**words))
    monkeypatch.setattr(private, "_first_place", None)
    private.use_place(str(tmp_path))
    listener, fd = private.new_listener(1)
    listener.close()
    os.close(fd)
    assert made == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []
