"""Other people's libraries train over the backend as libraries.md says, with the numbers that they have over Gloo.

Each library gets an interpreter of its own: importing some of them changes torch or the environment for good.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.libraries.run import BY_HAND, LIGHT, SETTINGS, blocks


def _is_missing(module):
    """Ask for the outermost package: to find "lightning.fabric" is to import Lightning here, which sets a variable."""
    return importlib.util.find_spec(module.partition(".")[0]) is None


@pytest.mark.parametrize("name", [*LIGHT, *BY_HAND])
@pytest.mark.slow
def test_a_library_gives_the_numbers_that_it_gives_over_gloo(name):
    """Each in a process in which nobody has asked for the backend before: torchft's block worked in no such one."""
    missing = [module for module in {**LIGHT, **BY_HAND}[name] if _is_missing(module)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: tests/libraries/run.py says how")
    done = subprocess.run(
        [sys.executable, "-m", "tests.libraries.run", name],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith("the same numbers over Phalanx and over Gloo")]
    assert len(told) == len(SETTINGS.get(name, [{}]))


@pytest.mark.slow
def test_the_backend_is_found_in_torchs_table_by_who_has_not_asked_for_it():
    """torchft makes groups from that table, where "PHALANX" was a KeyError until somebody had asked for the backend."""
    code = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
assert list(dist.Backend._plugins) == [] and not dist.Backend._plugins  # while one is listed, torch misreads "cpu:gloo"
options = _DistributedBackendOptions()
options.store, options.group_rank, options.group_size, options.group_id = dist.HashStore(), 0, 1, "alone"
options.timeout = dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else options.timeout
group = dist.Backend._plugins["PHALANX"].creator_fn(options, None)
group.allreduce([x := torch.ones(3)]).wait()
print(group.getBackendName(), x.tolist(), "PHALANX" in dist.Backend._plugins, dist.Backend._plugins.get("X"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "phalanx [1.0, 1.0, 1.0] True None\n", done.stdout + done.stderr


@pytest.mark.slow
def test_a_library_that_is_not_told_of_us_chooses_as_without_us():
    """Accelerate chose "mpi" wherever mpi4py and Phalanx were installed, and a script that names no backend died."""
    code = "from accelerate import Accelerator; losses.append(Accelerator(cpu=True).num_processes)"
    ask = f"from tests.libraries.run import in_ranks; print(*in_ranks({code!r}, {{}}))"
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "{'gloo'} [[[2], {}], [[2], {}]]\n", done.stdout + done.stderr


def test_every_block_of_the_document_is_run():
    assert set(blocks()) == {*LIGHT, *BY_HAND}
