"""A command whose output cannot be written says so in one line.

`phalanx run --help` on an ASCII terminal, `doctor` with a closed standard output and every command with a full one
ended in a traceback, and so did a script that is not there in a current folder that has been removed.
"""

import subprocess
import sys

import pytest

COMMANDS = {
    "help": ["--help"],
    "run": ["run", "--help"],
    "run later": ["run", "--nproc-per-node", "2", "--help"],
    "version": ["--version"],
    "explain": ["explain", "ring", "--world-size", "8"],
    "bench": ["bench", "--help"],
}


def phalanx(words, redirect="", **environment):
    """What `phalanx words redirect` gives in a shell."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m phalanx.cli "$@" {redirect}', sys.executable, *words],
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_full_standard_output_is_told_in_a_line(words):
    done = phalanx(words, ">/dev/full")
    assert done.stderr.decode() == "phalanx: cannot write to standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_standard_output_is_silence(words):
    done = phalanx(words, ">&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(words):
    done = phalanx(words, "| true; exit $?")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_ascii_terminal_gets_question_marks(words):
    done = phalanx(words, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10


@pytest.mark.slow
def test_doctor_lives_without_a_standard_output():
    closed = phalanx(["doctor"], ">&-")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_a_current_folder_that_has_been_removed_is_named(tmp_path):
    def inside(command):
        folder = tmp_path / "gone"
        folder.mkdir()
        script = f'cd "{folder}" && rmdir "{folder}" && {command}'
        return subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True)

    for words in ("train.py", "-m train"):
        done = inside(f'"$0" -m phalanx.cli run {words}')
        assert done.stderr == (
            "phalanx run: the current folder was removed, and PyTorch cannot be loaded in it. "
            "cd to an existing folder.\n"
        )
        assert done.returncode == 2
    assert inside('"$0" -m phalanx.cli run --nproc-per-node 1 --no-python echo here').stdout == "[0] here\n"
