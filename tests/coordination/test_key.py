"""The job's key: how it looks, where it is looked for, and which files are refused."""

import multiprocessing
import os

import pytest

from phalanx._comm.control import key_file
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import default_path, find_key, make_key, read_key
from phalanx.errors import AuthenticationError


def test_a_key_is_read_as_it_was_printed_and_does_not_show_itself():
    key = Key.generate()
    assert Key.parse(f" {key}\n") == key
    assert str(key) not in repr(key)
    assert key.raw.hex() not in repr(key)
    assert key.fingerprint in repr(key)


@pytest.mark.parametrize("mistake", ["cut", "letter", "prefix", "empty", "not ascii"])
def test_a_key_that_was_copied_wrongly_is_said_to_be_and_not_repeated(mistake):
    text = str(Key.generate())
    wrong = {
        "cut": text[:-3],
        "letter": text[:10] + ("a" if text[10] != "a" else "b") + text[11:],
        "prefix": text[4:],
        "empty": "",
        "not ascii": text[:-1] + "é",
    }[mistake]
    with pytest.raises(ValueError, match=r"copy it again|starts with 'plx-'") as error:
        Key.parse(wrong)
    assert text[8:20] not in str(error.value)


def test_both_sides_derive_the_same_two_pairs_and_different_keys_different_ones():
    key = Key.generate()
    again = Key.parse(str(key))
    assert key.member_pair() == again.member_pair()
    assert key.coordinator_pair() == again.coordinator_pair()
    pairs = [key.member_pair(), key.coordinator_pair(), Key.generate().member_pair()]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 3
    assert pairs[0].secret.decode() not in repr(pairs[0])


def test_a_key_is_looked_for_in_the_file_the_variables_and_the_configuration_folder(tmp_path):
    keys = {name: make_key(tmp_path / name / "phalanx" / "key")[0] for name in ("argument", "variable", "xdg")}
    environment = {"HOME": str(tmp_path / "nobody")}
    assert find_key(environment=environment) is None
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert find_key(environment=environment) == keys["xdg"]
    environment["PHALANX_KEY"] = str(typed := Key.generate())
    assert find_key(environment=environment) == typed
    environment["PHALANX_KEY_FILE"] = str(tmp_path / "variable" / "phalanx" / "key")
    assert find_key(environment=environment) == keys["variable"]
    assert find_key(tmp_path / "argument" / "phalanx" / "key", environment) == keys["argument"]
    no_folder = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "relative"}
    assert default_path(no_folder) == tmp_path / ".config" / "phalanx" / "key"
    with pytest.raises(AuthenticationError, match=r"the key in PHALANX_KEY: .*copy it again"):
        find_key(environment={"PHALANX_KEY": str(typed)[:-2]})


def test_no_key_is_made_in_the_working_folder_for_a_user_without_a_home(tmp_path, monkeypatch):
    """It was in "./~/.config/phalanx/key", which may be a folder that many can read, or a repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for a user id that no database has
    with pytest.raises(AuthenticationError, match="PHALANX_KEY_FILE"):
        make_key(default_path({}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660])
def test_a_key_file_that_others_can_read_or_change_is_refused_with_what_to_type(tmp_path, mode):
    path = tmp_path / "key"
    make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match=rf"mode {mode:04o}.*\nchmod 600 {path}"):
        read_key(path)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        make_key(path)


def test_a_key_file_that_is_none_is_said_to_be(tmp_path):
    with pytest.raises(
        AuthenticationError, match=r"missing: No such file or directory\.\n`phalanx key .*missing` creates"
    ):
        read_key(tmp_path / "missing")
    with pytest.raises(AuthenticationError, match="not a regular file"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(AuthenticationError, match="not a regular file"):
        read_key(tmp_path / "pipe")
    (tmp_path / "text").touch(0o600)
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    with pytest.raises(AuthenticationError, match="text: "):
        read_key(tmp_path / "text")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path):
    make_key(tmp_path / "key")
    os.chown(tmp_path / "key", 12345, 12345)
    with pytest.raises(AuthenticationError, match=r"belongs to another user \(uid 12345\)"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("links", [True, False])
def test_a_key_is_made_once_and_by_many_at_a_time_the_same(tmp_path, monkeypatch, links):
    if not links:  # as on a file system that has none

        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "home" / "phalanx" / "key"
    with multiprocessing.get_context("fork").Pool(8) as pool:
        made = pool.map(make_key, [path] * 32)
    assert len({key for key, _ in made}) == 1
    assert sum(is_new for _, is_new in made) == 1
    assert [file.name for file in path.parent.iterdir()] == ["key"]


def test_a_key_that_becomes_whole_just_after_it_was_read_is_taken(tmp_path, monkeypatch):
    path, key = tmp_path / "key", Key.generate()
    path.touch(0o600)  # another process has made the file, and its key is not in it yet

    def read(path):
        try:
            return read_key(path)
        finally:
            path.write_text(f"{key}\n")

    monkeypatch.setattr(key_file, "read_key", read)
    assert make_key(path) == (key, False)
