"""Ranks of `examples/elastic.py` are killed while it runs; it ends with the weights of a run that was left in peace."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
COMMAND = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(SCRIPT), "--epochs", "12"]


def start():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process, said=""):
    output = said + process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    (weights,) = re.findall(r"weights (.*)$", output, re.MULTILINE)
    return output, weights


@pytest.mark.slow
def test_killed_ranks_cost_no_bit():
    disturbed = start()
    processes: dict[str, int] = {}
    said = ""
    for line in disturbed.stdout:
        said += line
        if found := re.match(r"\[(\d)\] process (\d+)", line):
            processes[found[1]] = int(found[2])
        elif "epoch 2:" in line:
            os.kill(processes["1"], signal.SIGKILL)
        elif "epoch 5:" in line:
            os.kill(processes["0"], signal.SIGKILL)
            break
    output, weights = finish(disturbed, said)
    assert output.count("is lost: SIGKILL") == 2, output
    assert weights == finish(start())[1]
