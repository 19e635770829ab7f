import json
import subprocess
import sys

import pytest

from phalanx._tools.doctor.trial import try_training


@pytest.fixture
def shadow_torch(tmp_path, monkeypatch):
    """Put a module of the given text in torch's place, for processes that are started from here."""

    def write(text):
        (tmp_path / "torch.py").write_text(text)
        monkeypatch.chdir(tmp_path)  # `python -m` looks into the current folder first

    return write


def test_a_torch_that_cannot_be_imported_is_told_in_its_own_words(shadow_torch):
    shadow_torch("raise ImportError('libtorch.so: cannot open shared object file')")
    torch, training = try_training()
    assert torch == ("the process ended with exit code 1: ImportError: libtorch.so: cannot open shared object file")
    assert not training.works


def test_a_torch_that_crashes_is_told_by_its_signal(shadow_torch):
    shadow_torch("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    torch, training = try_training()
    assert torch == "the process died by SIGILL"
    assert training.detail == "the process died by SIGILL before two ranks had taken a step"


def doctor(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "phalanx.cli.__main__", "doctor", *words], capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.slow
def test_the_command_succeeds_where_two_ranks_really_take_a_step():
    run = doctor("--json")
    assert (run.returncode, run.stderr) == (0, "")
    words = json.loads(run.stdout)
    assert words["would_train"] is True
    assert words["facts"]["torch"]["registered"] is True
    assert "two ranks took a step in" in words["facts"]["training"]["detail"]


def test_the_command_fails_where_training_does_not_work(shadow_torch, tmp_path):
    shadow_torch("raise ImportError('torn')")
    run = doctor(cwd=tmp_path)
    assert run.returncode == 1
    assert "problem  torch      cannot be imported: the process ended with exit code 1: ImportError: torn" in run.stdout
    assert run.stdout.rstrip().endswith("Training would not work here: 2 problems, 0 warnings.")


def test_the_command_imports_no_torch_itself():
    code = "import sys, phalanx.cli.doctor, phalanx._tools.doctor.host; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.slow(but=("8",))
@pytest.mark.parametrize("open_files", [5, 8, 30])
def test_few_open_files_are_a_finding_and_no_traceback(open_files: int) -> None:
    """With fewer than ten it ended in a traceback of subprocess; with 40 its advice was `ulimit -n 40`."""
    command = f'ulimit -n {open_files}; exec "$0" -m phalanx.cli doctor'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"limits     {open_files} open files per process, and no more than {open_files} are allowed" in done.stdout
    assert "raise the hard limit to 4096" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
