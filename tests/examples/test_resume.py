"""`examples/resume.py` is killed while it runs, and ends with the bits of a run that was left in peace."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "resume.py"


def start(folder):
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--steps", "100", "--every", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    (weights,) = re.findall(r"^weights (.*)$", output, re.MULTILINE)
    return output, weights


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    peaceful = start(tmp_path / "peaceful")
    killed = start(tmp_path / "killed")
    for line in killed.stdout:
        if line.startswith("step 70:"):  # in the second epoch; it has gone on by now
            killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=600)
    output, weights = finish(start(tmp_path / "killed"))
    (begins,) = re.findall(r"^begins after step (\d+)$", output, re.MULTILINE)
    assert 65 <= int(begins) <= 100  # one that a slow machine kills too late has ended, which is as good an end
    assert weights == finish(peaceful)[1]
