"""Other people's libraries train over the backend as docs/libraries.md says, with the numbers that they have over Gloo.

Each library gets an interpreter of its own: importing some of them changes torch or the environment for good.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.libraries.run import BY_HAND, LIGHT, blocks


@pytest.mark.parametrize(
    "names", [["accelerate"], ["ignite", "ignite-by-name"], ["fabric", "lightning", "torchmetrics"], ["checkpoint"]]
)
def test_a_library_gives_the_numbers_that_it_gives_over_gloo(names):
    done = subprocess.run(
        [sys.executable, "-m", "tests.libraries.run", *names],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith("the same numbers over Phalanx and over Gloo")]
    assert len(told) == len(names)


def test_a_library_that_is_not_told_of_us_chooses_as_without_us():
    """Accelerate chose "mpi" wherever mpi4py and Phalanx were installed, and a script that names no backend died."""
    code = "from accelerate import Accelerator; losses.append(Accelerator(cpu=True).num_processes)"
    ask = f"from tests.libraries.run import in_ranks; print(*in_ranks({code!r}, {{}}))"
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110
    )
    assert done.stdout == "{'gloo'} [[[2], {}], [[2], {}]]\n", done.stdout + done.stderr


def test_every_block_of_the_document_is_run():
    assert set(blocks()) == {*LIGHT, *BY_HAND}
