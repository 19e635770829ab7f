"""Seven small programs, as a new user writes them, start under the launchers and get the numbers of one process.

With PyTorch 2.15.0 not one of them started: it attaches a recorder to each new group and asked ours for a name that it
did not have. 5,000 tests with one PyTorch had said that all was well. `make matrix` runs these first for each pair.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent
NAMES = ["ddp_zero", "torch_ddp", "fsdp2", "remote_calls", "elastic_kill", "pipeline", "every_collective"]
PHALANX_RUN = ["-m", "phalanx", "run", "--nproc-per-node", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHED = ("PHALANX_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def _run(launcher, name):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHED)}
    command = [sys.executable, *launcher, str(PROGRAMS / f"{name}.py")]
    return subprocess.run(
        command, env={**kept, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )


def test_each_program_of_the_folder_is_run():
    assert sorted(NAMES) == sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.startswith("test_"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(but=("torch_ddp",))
def test_a_small_program_gets_the_numbers_of_one_process_under_phalanx_run(name):
    ended = _run(PHALANX_RUN, name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Equal lines of several ranks are shown once, as "[0-1] right".
    right = "".join(line for line in ended.stdout.splitlines() if line.endswith("] right"))
    assert set("01") <= set(right), ended.stdout + ended.stderr


@pytest.mark.parametrize("name", [name for name in NAMES if name != "elastic_kill"])  # torchrun replaces nobody
@pytest.mark.slow
def test_a_small_program_gets_the_numbers_of_one_process_under_torchrun(name):
    ended = _run(TORCHRUN, name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right") == 2, ended.stdout + ended.stderr
