"""Under `phalanx run`, inside `phalanx.elastic.run`, a call that a loss has ended is made again."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("elastic_count.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher forks replacements on Linux")
def test_a_call_that_a_loss_has_ended_is_made_again(tmp_path):
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "rank 1 (pid" in done.stdout
    assert "Starting a replacement" in done.stdout
    assert done.stdout.count("has all 7 keys") == 2
