"""`phalanx key` and `phalanx coordinator`, as people type them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import read_key

PHALANX = [sys.executable, "-m", "phalanx.cli"]


@pytest.fixture
def home(tmp_path):
    """An environment in which nobody has a key."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_KEY", "XDG_"))}
    return {**kept, "HOME": str(tmp_path)}


def phalanx(*words, env, **options):
    return subprocess.run([*PHALANX, *words], env=env, capture_output=True, text=True, timeout=600, **options)


@pytest.mark.slow
def test_key_makes_one_once_and_shows_what_is_asked_for(home, tmp_path):
    path = tmp_path / ".config" / "phalanx" / "key"
    first = phalanx("key", env=home)
    key = read_key(path)
    assert first.stdout.splitlines() == [
        f"A new key is in {path} (fingerprint {key.fingerprint}).",
        f"The other hosts need the same one: scp -p {path} HOST:{path}",
    ]
    assert phalanx("key", env=home).stdout.startswith(f"The key is in {path} (fingerprint")
    assert phalanx("key", "--print", env=home).stdout == f"{key}\n"
    assert phalanx("key", "--path", env=home).stdout == f"{path}\n"
    assert phalanx("key", "--fingerprint", env=home).stdout == f"{key.fingerprint}\n"
    other = tmp_path / "job.key"
    assert phalanx("key", str(other), env=home).returncode == 0
    assert read_key(other) != key


def test_key_refuses_a_file_that_others_can_read_and_changes_nothing(home, tmp_path):
    other = tmp_path / "job.key"
    phalanx("key", str(other), env=home)
    before = other.read_bytes()
    other.chmod(0o644)
    refused = phalanx("key", str(other), "--print", env=home)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert f"chmod 600 {other}" in refused.stderr
    assert other.read_bytes() == before


def test_a_coordinator_without_a_key_says_how_to_make_one_and_listens_nowhere(home):
    refused = phalanx("coordinator", "--bind", ":0", env=home, stdin=subprocess.DEVNULL)
    assert refused.returncode == 1
    assert "cannot listen at :0: there is no key" in refused.stderr
    assert "Create a key once with `phalanx key`" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_says_in_one_line_how_to_join_and_ends_without_a_trace(home, tmp_path, number):
    key = Key.generate()
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(f"{key}\n")
    words = [*PHALANX, "coordinator", "--bind", "127.0.0.1:0", "--job", "night", "--key-file", str(tmp_path / "key")]
    with subprocess.Popen(words, env=home, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            said = re.fullmatch(
                r"coordinator: listening at (\S+:\d+) \(key (\w+)\)\. To join: phalanx join (\S+)\n", line
            )
            assert said, line
            assert said[1] == said[3]
            assert said[2] == key.fingerprint
            assert str(key) not in line
            with Client(said[1], key) as client:
                assert client.job == "night"
                client.set("a", "1")
                assert str(key) not in Path(f"/proc/{process.pid}/cmdline").read_text()
                process.send_signal(number)
                assert process.stderr.read() == "coordinator: ended.\n"
                assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_the_lines_of_the_manual_do_what_it_says(home, tmp_path):
    manual = (Path(__file__).parents[2] / "docs" / "explanation" / "security.md").read_text()
    lines = [
        line.removeprefix("$ ").partition(" #")[0] for line in manual.splitlines() if line.startswith("$ phalanx key")
    ]
    assert len(lines) >= 3
    for line in lines:
        done = phalanx(*line.split()[1:], env=home, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.slow
def test_what_cannot_be_bound_is_said_with_what_can(home, tmp_path):
    phalanx("key", env=home)
    for bind in ("203.0.113.1:0", "no-such-host.invalid:0"):
        refused = phalanx("coordinator", "--bind", bind, env=home)
        assert refused.returncode == 1
        assert f"the coordinator cannot listen at {bind}: " in refused.stderr
        assert "Traceback" not in refused.stderr
    refused = phalanx("coordinator", "--bind", "nonsense", env=home)
    assert refused.returncode == 1
    assert "an address is HOST:PORT" in refused.stderr
