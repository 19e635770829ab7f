"""Every way in which PyTorch's processes find each other: rendezvous URLs, a store, mp.spawn, torchrun, mpiexec."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import phalanx._comm.backend.create
import phalanx._comm.backend.process_group  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import run_ranks

SCRIPT = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(tensor)
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as out:
    out.write(f"{dist.get_backend()} {dist.get_world_size()} {tensor.item()}")
dist.destroy_process_group()
"""


def _sum_of_ranks(rank):
    tensor = torch.tensor([2.0**rank])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_torchrun_starts_again_after_a_start_that_failed(tmp_path):
    """The agent's store outlives the attempt: who had come in the one before was taken for somebody of this one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if first and os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(sys.argv[1] + '/coming'): pass\n"
        "    sys.exit(3)\n"
        "if first: open(sys.argv[1] + '/coming', 'w').close()\n" + SCRIPT
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port()), str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["phalanx 2 3.0"] * 2


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("how", ["env", "tcp", "file", "store"])
def test_ranks_meet_through_every_kind_of_address(tmp_path, how, world_size):
    port = _free_port()

    def meet(rank, world_size):
        place = {"rank": rank, "world_size": world_size}
        if how == "env":
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
            dist.init_process_group("phalanx")
        elif how == "tcp":
            dist.init_process_group("phalanx", init_method=f"tcp://127.0.0.1:{port}", **place)
        elif how == "file":
            dist.init_process_group("phalanx", init_method=f"file://{tmp_path}/rendezvous", **place)
        else:
            store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
            dist.init_process_group("phalanx", store=store, **place)
        return _sum_of_ranks(rank)

    assert run_ranks(meet, world_size, init=False) == [2.0**world_size - 1] * world_size


def _spawned(rank, folder):
    dist.init_process_group("phalanx", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    Path(folder, str(rank)).write_text(str(_sum_of_ranks(rank)))


@pytest.mark.slow
def test_processes_of_mp_spawn_train_together(tmp_path):
    mp.spawn(_spawned, args=(str(tmp_path),), nprocs=2)
    assert [Path(tmp_path, str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


def _run_script(tmp_path, *launcher):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["OMP_NUM_THREADS"] = "1"
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")  # in a container, say
    done = subprocess.run(
        [*launcher, str(script), str(out)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in sorted(out.iterdir())}


@pytest.mark.slow
def test_a_script_with_the_backends_name_runs_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert _run_script(tmp_path, *launcher) == {"0": "phalanx 2 3.0", "1": "phalanx 2 3.0"}


@pytest.mark.slow
def test_a_script_with_the_backends_name_runs_under_mpiexec(tmp_path):
    launcher = [str(Path(sys.prefix, "bin", "mpiexec")), "-n", "2", sys.executable]
    assert _run_script(tmp_path, *launcher) == {"0": "phalanx 2 3.0", "1": "phalanx 2 3.0"}
