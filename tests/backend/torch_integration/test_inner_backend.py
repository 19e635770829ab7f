"""torch's C++ finds a backend behind our groups, where Python can make one, and what it calls there reaches them."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._C import _distributed_c10d as c10d

from phalanx._comm.backend.torch_integration.groups import can_attach
from phalanx.testing import run_ranks

needs_inner_backend = pytest.mark.skipif(not can_attach(), reason="this torch does not let Python create a Backend")


@pytest.mark.slow
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
        timeout=600,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("phalanx the second\n", "")


@needs_inner_backend
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_an_operator_of_c10d_reaches_the_group(rank, world_size):
    """Up to 2.13 it ends in "No backend type associated with device type cpu"."""
    expected = [world_size * (world_size + 1) / 2] * 5
    tensor, group = torch.full((5,), rank + 1.0), dist.group.WORLD
    op = torch.classes.c10d.ReduceOp()  # SUM
    torch.ops.c10d.allreduce_([tensor], group.boxed(), op, None, False, -1)
    assert tensor.tolist() == expected


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


NO_BACKEND = """
import torch, torch.distributed as dist
from phalanx._comm.backend import process_group  # it reads another name of Backend, and has a line of its own for it
from phalanx._comm.backend.torch_integration import groups
{change}
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
dist.all_reduce(x, group=dist.new_group([0]))
try:
    dist.group.WORLD.register_pre_hook(1, print)
except RuntimeError as error:
    print(error)
print(x.tolist())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "FlightRecorderHook"), reason="this torch hangs no recorder")
@pytest.mark.parametrize(
    ("change", "problem", "num_lines"),
    [
        ("groups._torch.Backend.__init__ = lambda self: None", "does not let Python create a Backend", 2),
        ("del groups._torch.Backend", "does not let Python create a Backend", 2),
        (
            "def attach(*args): raise RuntimeError('more')\ndist.distributed_c10d.FlightRecorderHook.attach = attach",
            "cannot attach its FlightRecorderHook to Phalanx groups (more)",
            1,
        ),
    ],
)
def test_a_group_begins_where_torch_can_hang_no_hook_on_it(change, problem, num_lines):
    """torch 2.15 made no group of ours when it could not hang its recorder on one; two lines with its NaN check."""
    run = subprocess.run(
        [sys.executable, "-c", NO_BACKEND.format(change=change)],
        env={"PATH": "/usr/bin:/bin", "TORCH_DIST_NAN_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = run.stderr.splitlines()
    assert run.stdout.splitlines()[-1:] == ["[1.0, 1.0]"], run.stderr
    assert (num_lines, True) == (len(told), all(problem in line for line in told)), run.stderr
    assert any("hooks of Phalanx groups are not called" in line for line in told)
    assert ("register_pre_hook: this torch does not let Python create a Backend" in run.stdout) == (num_lines == 2)
