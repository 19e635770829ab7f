"""What `init_process_group` means where it is left open: under `phalanx run` this backend, else torch's own choice.

`init_process_group()` and `init_device_mesh("cpu", ...)` gave Gloo under `phalanx run`, without a word; and
`python train.py` with backend "phalanx" ended in torch's "environment variable RANK expected, but not set", which says
neither what was forgotten nor that `phalanx run` is how to start it.
"""

import subprocess
import sys

import pytest
import torch.distributed as dist
from tests.system.phalanx_command import run, write_script

import phalanx
from phalanx._comm.backend.start import explain_unlaunched, is_default, refuse_unknown_backend

UNNAMED = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

def look(*names):
    total = torch.ones(1)
    dist.all_reduce(total)
    print(*names, dist.get_backend(), type(dist.group.WORLD).__name__, total.item())
    dist.destroy_process_group()

dist.init_process_group()
look("open:")
init_device_mesh("cpu", (2,))
look("mesh:")
dist.init_process_group(init_method="env://", timeout=None)
look("env://:")
dist.init_process_group("gloo")
look("named:")
dist.init_process_group(backend="cpu:gloo")
look("by device:")
os.environ.pop("PHALANX_STORE")  # as if the launcher had been torchrun
dist.init_process_group()
look("torchrun:")
"""


@pytest.mark.slow
def test_under_phalanx_run_a_start_that_names_no_backend_means_ours(tmp_path) -> None:
    finished = run("--nproc-per-node", "2", write_script(tmp_path, UNNAMED))
    for rank in "01":  # lines that come more than a moment apart are not folded into one
        lines = [line.partition("] ") for line in finished.lines]
        assert [text for ranks, _, text in lines if ranks in (f"[{rank}", "[0-1")] == [
            "open: phalanx PhalanxProcessGroup 2.0",
            "mesh: phalanx PhalanxProcessGroup 2.0",
            "env://: phalanx PhalanxProcessGroup 2.0",
            "named: gloo ProcessGroup 2.0",
            "by device: cpu:gloo ProcessGroup 2.0",
            "torchrun: undefined ProcessGroup 2.0",
        ], finished.err


def test_only_a_start_under_phalanx_run_that_names_no_device_is_ours() -> None:
    ours = {"PHALANX_STORE": "/proc/1/fd/3", "PHALANX_STORE_OF": "0/2/5/night", "RANK": "0", "WORLD_SIZE": "2"}
    ours |= {"MASTER_PORT": "5", "TORCHELASTIC_RUN_ID": "night"}
    assert is_default(ours, None, "cpu", ["cpu"])
    assert is_default(ours, None, "cuda", ["cpu", "cuda"])  # NCCL carries those tensors inside our group
    assert not is_default(ours, None, "cuda", ["cpu"])  # nothing here would
    assert not is_default(ours, None, "xpu", ["cpu", "cuda"])
    assert not is_default(ours, "cuda:0", "cuda", ["cpu", "cuda"])  # torch's engine of that device was asked for
    assert not is_default({}, None, "cpu", ["cpu"])
    assert not is_default({"PHALANX_STORE": ""}, None, "cpu", ["cpu"])
    # Each tells a rank of another launcher that one of ours has started.
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert not is_default({**ours, name: "7"}, None, "cpu", ["cpu"])


@pytest.mark.slow
def test_a_script_without_a_launcher_is_told_to_use_one(tmp_path) -> None:
    script = write_script(
        tmp_path,
        "import torch.distributed as dist\n"
        "for backend, extra in (('phalanx', {}), ('PHALANX', dict(rank=0)), ('gloo', {}), (None, {})):\n"
        "    try:\n"
        "        dist.init_process_group(backend, **extra)\n"
        "    except ValueError as error:\n"
        "        print(str(error).replace('\\n', '|'))\n",
        "fit.py",
    )
    kept = {"PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, script], env=kept, capture_output=True, text=True, check=True).stdout
    ours, ranked, gloo, unnamed = out.splitlines()
    torchs = "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not"
    assert ours.startswith(
        "init_process_group with backend 'phalanx': no launcher started this process: RANK, WORLD_SIZE, "
        f"MASTER_ADDR, MASTER_PORT are not set.|torch said: {torchs} set|"
        "Start it with `phalanx run --nproc-per-node 2 fit.py` "
    )
    assert "started this process: WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set." in ranked
    assert gloo == unnamed == f"{torchs} set"  # a program that does not ask for us hears torch alone


@pytest.mark.parametrize("argv", [[], ["-c"], ["/usr/bin/pytest"]])
def test_a_process_without_a_script_gets_an_example(argv) -> None:
    assert "phalanx run --nproc-per-node 2 train.py`" in explain_unlaunched(["RANK"], argv, "x")


def test_the_name_and_the_signature_are_torchs_own() -> None:
    assert dist.init_process_group.__module__ == "torch.distributed.distributed_c10d"
    assert dist.init_process_group is dist.distributed_c10d.init_process_group is dist.device_mesh.init_process_group


@pytest.mark.parametrize("given", ["phalnax", "cpu:phalnax", "cpu:gloo,cuda:Phalnax"])
def test_a_backend_that_nobody_has_registered_is_refused_with_the_near_name(given) -> None:
    """torch said `AssertionError: Unknown backend type phalnax`, and not which there are."""
    with pytest.raises(ValueError, match=r"unknown backend 'phalnax'\. Did you mean 'phalanx'\? torch knows .*'gloo'"):
        refuse_unknown_backend(given)


def test_init_refuses_it_too() -> None:
    with pytest.raises(ValueError, match=r"phalanx\.init: unknown backend 'phalnax'\. Did you mean 'phalanx'"):
        phalanx.init("phalnax")


@pytest.mark.parametrize("given", ["gloo", "GLOO", "cpu:gloo,cuda:nccl", "phalanx", "undefined", None, ""])
def test_a_backend_that_torch_knows_is_left_to_torch(given) -> None:
    refuse_unknown_backend(given)


@pytest.mark.slow
def test_a_mistyped_backend_ends_a_job_with_that_error(tmp_path) -> None:
    script = write_script(tmp_path, "import torch.distributed as dist\ndist.init_process_group('phalnax')\n")
    finished = run("--nproc-per-node", "2", script)
    assert finished.code == 1
    assert "ValueError: init_process_group: unknown backend 'phalnax'. Did you mean 'phalanx'?" in finished.err
    assert "AssertionError" not in finished.err
