"""The name "phalanx" means the right devices."""

import os
import subprocess
import sys

import pytest
import torch

# What torch's CUDA build is on a machine without a GPU.
WITHOUT_GPU = """
import torch, torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

dist.is_nccl_available = lambda: True
from phalanx import _autoload
_autoload.register()
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
shards = sharded_tensor.ones(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), (4, 3))
whole = torch.zeros(4, 3)
shards.gather(0, whole)
print(whole.sum().item(), dist.BackendConfig(dist.Backend("phalanx")))
"""


def _run(program, **variables):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_with_nccl_on_a_machine_without_a_gpu_keeps_shards_on_the_cpu():
    """ "cuda" was registered wherever NCCL was compiled in, and `ShardedTensor.gather` asked for the current GPU."""
    assert _run(WITHOUT_GPU, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "12.0 cpu:phalanx"
