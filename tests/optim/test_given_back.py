"""What has moved into shared memory is given back to the system, also where malloc keeps what a step frees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from phalanx.backend.malloc import keep_freed_memory
from phalanx.testing import run_ranks

NUM_BYTES = 48 * 2**20  # of the parameters; below 1 GiB, up to which `phalanx run` has malloc keep a block


def own_bytes() -> int:
    """Memory of this process that is no file's, and not shared with the other ranks."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_the_memory_that_parameters_and_first_gradients_had_is_given_back() -> None:
    """Each rank kept 142 MB for good, at 25 million parameters."""

    def train(rank: int, world_size: int) -> int:
        keep_freed_memory()
        before = own_bytes()
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(NUM_BYTES // 2**22)))
        assert own_bytes() - before > 0.9 * NUM_BYTES
        replica = phalanx.DistributedDataParallel(model)
        optimizer = phalanx.ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(3):
            replica(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return own_bytes() - before

    for grown in run_ranks(train, 2):
        assert grown < NUM_BYTES / 2
