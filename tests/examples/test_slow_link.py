"""Two hosts with a slow link: what is sent is counted on the interface."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.testing import why_no_hosts

SCRIPT = Path(__file__).parents[2] / "examples" / "slow_link.py"


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.slow
def test_replicas_that_train_apart_send_a_fraction_of_the_bytes(tmp_path):
    command = [sys.executable, str(SCRIPT), "--steps", "48", "--rate", "1gbit"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sent = {name: float(number) for name, number in re.findall(r"^(\w+): ([\d.]+) MB", done.stdout, re.MULTILINE)}
    losses = [float(loss) for loss in re.findall(r"48 steps in .*: loss ([\d.]+)", done.stdout)]
    assert sent["diloco"] < sent["multi_worker_mirrored"] / 8, sent
    assert len(losses) == 2
    assert max(losses) < 3.5  # of 128 letters, at random, ln 128 = 4.85
