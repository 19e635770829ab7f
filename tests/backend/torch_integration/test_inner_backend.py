"""torch's C++ finds a backend behind our groups, where Python can make one, and what it calls there reaches them."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.backend.torch_integration.inner_backend import can_attach
from phalanx.testing import run_ranks

needs_inner_backend = pytest.mark.skipif(not can_attach(), reason="this torch lets Python make no Backend")


@pytest.mark.parametrize("size", ["2000", "0"])
def test_a_group_starts_whether_torch_records_its_collectives_or_not(size):
    """torch 2.15 hangs a flight recorder on every group that is asked for: none of ours began, for want of a name."""
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "second = dist.new_group([0], group_desc='the second')\n"
        "print(dist.get_backend(second), second.group_desc)\n"
        "dist.destroy_process_group()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "TORCH_FR_BUFFER_SIZE": size},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("phalanx the second\n", "")


@needs_inner_backend
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_operator_of_c10d_reaches_the_group(world_size):
    """Up to 2.13 it ends in "No backend type associated with device type cpu"."""

    def body(rank, world_size):
        tensor, group = torch.full((5,), rank + 1.0), dist.group.WORLD
        op = torch.classes.c10d.ReduceOp()  # SUM
        torch.ops.c10d.allreduce_([tensor], group.boxed(), op, None, False, -1)
        return tensor.tolist()

    expected = [world_size * (world_size + 1) / 2] * 5
    assert run_ranks(body, world_size) == [expected] * world_size


@needs_inner_backend
def test_torchs_own_methods_of_a_group_reach_ours():
    """C++ finds no method of Python for these operations: gather is one, whose answer differs by rank."""

    def body(rank, world_size):
        options = c10d.GatherOptions()
        options.rootRank = 1
        outputs = [[torch.zeros(2) for _ in range(2)]] if rank == 1 else []
        dist.ProcessGroup.gather(dist.group.WORLD, outputs, [torch.full((2,), rank + 1.0)], options).wait()
        return [o.tolist() for o in outputs[0]] if outputs else None

    assert run_ranks(body, 2) == [None, [[1.0, 1.0], [2.0, 2.0]]]
