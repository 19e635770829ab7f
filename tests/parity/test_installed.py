"""Phalanx installed and not asked for: every program sees `torch.distributed` as if it were not installed.

`is_mpi_available()` said True wherever mpi4py could be imported, and Accelerate, which chooses by it, took "mpi": a
plain `Accelerator(cpu=True)` under torchrun died. Every RPC program ended with "Exception ignored in: <generator object
env_rendezvous …> TypeError: catching classes that do not inherit from BaseException is not allowed", since a generator
of ours was still open when the interpreter emptied its modules. Gloo's own errors came in our words. And a group
"cpu:gloo" did not know that it was Gloo's ("undefined"), because torch looks at no name once any plugin is registered.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.testing import run_ranks

PROGRAM = str(Path(__file__).with_name("torch_alone.py"))
LAUNCHERS = ("PHALANX_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI_", "OMPI_", "TORCHELASTIC_")


def _run(*arguments, installed, program=PROGRAM):
    """The program's end, with or without what `import torch` calls of us."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    variables["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # of a rendezvous that fails torch logs every try, with times
    if not installed:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, program, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)


@pytest.fixture
def ports():
    """One that is taken and at which nobody listens, and two that are free."""
    with socket.socket() as deaf, socket.socket() as free, socket.socket() as another:
        for s in (deaf, free, another):
            s.bind(("127.0.0.1", 0))
        numbers = [s.getsockname()[1] for s in (deaf, free, another)]
        free.close()
        another.close()
        yield numbers


@pytest.mark.slow
def test_a_program_that_does_not_ask_for_us_sees_torch_alone(tmp_path, ports):
    ended = {there: _run(tmp_path / str(there), *ports, installed=there) for there in (True, False)}
    assert [run.returncode for run in ended.values()] == [0, 0], ended[True].stderr + ended[False].stderr
    here, alone = (json.loads((tmp_path / str(there)).read_text()) for there in ended)
    # The name by which we can be asked for, and the files that hold it.
    for registry in ("backend_list", "names"):
        here[registry] = [name for name in here[registry] if name.lower() != "phalanx"]
    for registry in ("backend_capability", "backend_type_map"):
        del here[registry]["phalanx"]
    for modules in ("modules", "modules in the end"):
        room = "phalanx._comm.backend.torch_integration"
        ours = {
            "phalanx",
            "phalanx._autoload",
            "phalanx._comm",
            "phalanx._comm.backend",
            room,
            f"{room}.backend_names",
        }
        assert ours == set(here[modules]) - set(alone[modules])
        here[modules] = [name for name in here[modules] if name not in ours]
    for what in alone:
        assert here[what] == alone[what], what
    assert here["available"]["is_mpi_available"] is False
    assert here["cpu:gloo: name"] == "'gloo'"
    assert ended[True].stderr == ended[False].stderr


@pytest.mark.slow
def test_an_rpc_program_that_also_asks_for_us_ends_in_silence(tmp_path, ports):
    program = tmp_path / "both.py"
    program.write_text(
        "import os, sys\n"
        "import torch.distributed as dist, torch.distributed.rpc as rpc\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=sys.argv[1])\n"
        "dist.init_process_group('phalanx')\n"
        "dist.barrier()\n"
        "os.environ.update(MASTER_PORT=sys.argv[2])\n"
        "rpc.init_rpc('alone', rank=0, world_size=1)\n"
        "print(rpc.rpc_sync('alone', max, args=(1, 2)), dist.get_backend())\n"
        "rpc.shutdown()\n"
        "dist.destroy_process_group()\n"
    )
    ended = _run(*ports[1:], installed=True, program=str(program))
    assert ended.stdout == "2 phalanx\n", ended.stderr
    assert "Exception ignored" not in ended.stderr
    # Torch's warnings show paths, and the folder of a clone is called phalanx.
    assert "phalanx" not in ended.stderr.replace(str(Path(dist.__file__).parents[1]), "")


def test_names_that_were_imported_before_anybody_asked_serve_our_groups_too():
    from torch.distributed import monitored_barrier  # a program may hold torch's function from the start

    def barrier(rank, world_size):
        monitored_barrier()
        # torch's own refusal: of its function up to 2.14, of the group from 2.15 on.
        with pytest.raises((ValueError, RuntimeError), match=r"is only implemented for GLOO|only GLOO supports"):
            monitored_barrier(dist.new_group(backend="fake"))
        monitored_barrier(dist.new_group(backend="gloo"))
        return monitored_barrier is dist.monitored_barrier

    assert run_ranks(barrier, 2) == [True, True]
