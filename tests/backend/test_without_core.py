"""Without the C core (no compiler, no futex) the same program runs, over Gloo, and says so once."""

import subprocess
import sys

_PROGRAM = """
import sys
sys.modules["phalanx._core"] = None  # what an installation without a compiler looks like to an import
import torch
import torch.distributed as dist
import phalanx
from phalanx.testing import run_ranks

def train(rank, world_size):
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((4, 3), float(rank))).sum().backward()
    half = dist.new_group([0])
    return total.tolist(), phalanx.shared_empty(5).shape, model.module.weight.grad[0].tolist(), dist.get_backend()

for result in run_ranks(train, 2, backend="phalanx"):
    assert result == ([3.0] * 3, torch.Size([5]), [2.0] * 3, "phalanx"), result
print("trained")
"""


def test_everything_runs_over_gloo_and_each_rank_says_so_once() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"
    assert "on ranks 0, 1 the C core was not built (reinstall with a C compiler); using Gloo" in done.stderr
