"""DDP and ZeroRedundancyOptimizer give back the memory that parameters and gradients had before they were shared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, write_script

MEBIBYTES = 48  # of the parameters, in blocks of 4; `phalanx run` has malloc keep blocks of up to 1 GiB

# Ranks of a process that nothing else has run in: memory that others have freed would hide what this takes and keeps.
SCRIPT = f"""
from pathlib import Path

import torch
from torch import nn

import phalanx

def own_mebibytes():
    status = Path("/proc/self/status").read_text()  # RssAnon: no file's, and not shared with the other ranks
    return int(status.split("RssAnon:")[1].split()[0]) // 1024

with phalanx.init():
    before = own_mebibytes()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range({MEBIBYTES // 4})))
    built = own_mebibytes()
    replica = phalanx.DistributedDataParallel(model)
    optimizer = phalanx.ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        replica(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("grown", built - before, own_mebibytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_the_memory_that_parameters_and_first_gradients_had_is_given_back(tmp_path: Path) -> None:
    """Each rank kept 147 MB for good, at 25 million parameters."""
    finished = run("--nproc-per-node", "2", write_script(tmp_path, SCRIPT))
    assert finished.code == 0, finished.err
    grown = [[int(word) for word in line.split()[-2:]] for line in finished.lines]
    assert grown, finished.out
    for built, trained in grown:
        assert built > 0.9 * MEBIBYTES
        assert trained < MEBIBYTES / 2, grown
