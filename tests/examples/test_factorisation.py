"""`examples/factorisation.py`: on servers the model becomes as good as in one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "factorisation.py"


@pytest.mark.parametrize("arguments", [[], ["--max-staleness", "2"]], ids=["synchronous", "stale"])
@pytest.mark.slow
def test_two_trainers_and_two_servers_reach_the_error_of_one_process(arguments):
    command = [sys.executable, str(SCRIPT), "--epochs", "3", "--batch-size", "2048", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, servers = (float(found) for found in re.findall(r"test RMSE ([\d.]+)", done.stdout))
    assert alone < 4.5
    assert servers < alone + (0.01 if not arguments else 0.25)
