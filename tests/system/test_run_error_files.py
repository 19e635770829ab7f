"""A script under torch.distributed.elastic's `record` leaves the same error file under `phalanx run` and torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.system.phalanx_command import run, write_script

# Rank 1 fails in the attempt that it is told to fail in; the others wait for it until they are stopped.
_SCRIPT = """
import os, signal, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= int(sys.argv[1]):
        return
    if os.environ["RANK"] == "1":
        raise ValueError("no data\\nin shard 7")
    signal.pause()

main()
"""
_LAUNCHERS = {"torchrun": ["torch.distributed.run"], "phalanx": ["phalanx.cli", "run"]}


def _launch(launcher: str, words: list[str], folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *_LAUNCHERS[launcher], "--nproc-per-node", "2", *words],
        env={**environ, "TMPDIR": str(folder), **extra},
        capture_output=True,
        text=True,
        check=False,
    )


def _read(path: Path) -> dict[str, Any]:
    """The error in the file, its time taken out, which must be one."""
    error: dict[str, Any] = json.loads(path.read_text())
    assert int(error["message"]["extraInfo"].pop("timestamp")) > 1.7e9
    return error


@pytest.mark.slow
def test_a_script_leaves_the_same_error_files_under_both_launchers(tmp_path: Path) -> None:
    """In the log folder, by the same names for each attempt, and in the file that was named for the launcher itself."""
    script = write_script(tmp_path, _SCRIPT)
    left: dict[str, dict[str, Any]] = {}
    for launcher in _LAUNCHERS:
        logs, own = tmp_path / f"{launcher}-logs", tmp_path / f"{launcher}.json"
        words = ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", "localhost:0"]
        done = _launch(
            launcher, [*words, "--log-dir", str(logs), script, "2"], tmp_path, TORCHELASTIC_ERROR_FILE=str(own)
        )
        assert done.returncode == 1
        (folder,) = logs.glob("job7_*")
        left[launcher] = {str(path.relative_to(folder)): _read(path) for path in folder.rglob("error.json")}
        left[launcher]["own"] = _read(own)
    assert left["phalanx"] == left["torchrun"]
    assert sorted(left["phalanx"]) == ["attempt_0/1/error.json", "attempt_1/1/error.json", "own"]
    assert left["phalanx"]["own"]["message"]["errorCode"] == 1


@pytest.mark.slow
def test_an_error_file_outlives_the_job_is_named_and_nothing_else_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    done = _launch("phalanx", [write_script(tmp_path, _SCRIPT), "1"], temporary)
    assert done.returncode == 1
    (path,) = (path for path in temporary.rglob("*") if path.is_file())
    assert _read(path)["message"]["message"] == "ValueError: no data\nin shard 7"
    assert done.stderr.endswith(f"ValueError: no data\nin shard 7\n\nIts error file: {path}\n")
    assert done.stderr.count("ValueError: no data at script.py:10 (exit code 1)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--log-dir", "logs")], ids=["temporary", "kept"])
def test_a_job_without_errors_leaves_no_folder_for_them(tmp_path: Path, flags: tuple[str, ...]) -> None:
    temporary, logs = tmp_path / "t", tmp_path / "logs"
    temporary.mkdir()
    words = [str(logs) if flag == "logs" else flag for flag in flags]
    assert _launch("phalanx", [*words, write_script(tmp_path, _SCRIPT), "0"], temporary).returncode == 0
    assert list(temporary.iterdir()) == []
    assert not flags or sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.slow
def test_what_a_script_below_a_shell_has_left_is_the_first_cause(tmp_path: Path) -> None:
    """Its Python can tell the launcher nothing: it said no more than "exit code 9"."""
    script = write_script(tmp_path, _SCRIPT)
    shell = write_script(tmp_path, f'"{sys.executable}" "{script}" 1\nexit 9\n', "train.sh")
    done = _launch("phalanx", ["--no-python", "bash", shell], tmp_path)
    assert done.returncode == 9
    assert "\nFirst failure: rank 1 of 2 on " in done.stderr
    assert ": ValueError: no data (exit code 9)\n\nTraceback (most recent call last):\n" in done.stderr


@pytest.mark.slow
def test_a_file_that_is_no_error_changes_nothing(tmp_path: Path) -> None:
    code = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({text!r}); os._exit(3)"
    for number, text in enumerate(("", "[]", '{"message": {}}', '{"message": {"message": 1, "extraInfo": 2}}', "\\0")):
        script = write_script(tmp_path, code.format(text=text), f"script{number}.py")
        finished = run("--no-preload", "--nproc-per-node", "1", script, env={"TMPDIR": str(tmp_path)})
        assert finished.code == 3
        assert "First failure: rank 0 of 1" in finished.err
        assert "exit code 3\n" in finished.err
        assert "Traceback" not in finished.err
