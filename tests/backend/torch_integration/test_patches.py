"""Each change to torch, in a torch that lacks what it builds upon, is left out in one line, and groups work."""

import json
import subprocess
import sys

import pytest

# Prints, for each patch and each thing that it needs, what came of a process in which torch has not that thing.
TRIALS = """
import importlib, json, os, pkgutil, sys, tempfile, types
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from phalanx._comm.backend import torch_integration
from phalanx._comm.backend.torch_integration import patch
from phalanx._base.torch_names import describe_missing, resolve
import phalanx._comm.backend.create  # once, not in each process

ROOM = torch_integration.__name__
for module in pkgutil.iter_modules(torch_integration.__path__):
    importlib.import_module(f"{ROOM}.{module.name}")

def break_torch(need):
    path, _, parameters = need.partition("(")
    place, _, name = path.rpartition(".")
    owner, known = resolve(place), resolve(path)
    if parameters:
        setattr(owner, name, lambda *args, **kwargs: known(*args, **kwargs))
    else:
        delattr(next((c for c in getattr(owner, "__mro__", [owner]) if name in vars(c)), owner), name)

def trial(patched, need):
    break_torch(need)
    patch._applied.discard(patched.name)  # looking a name up may have imported the module that is changed then
    module, _, name = patched.name.partition(".")
    change = getattr(sys.modules[f"{ROOM}.{module}"], name)
    for _ in range(2):
        change(print) if name == "call_before_fetch" else change()
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.all_reduce(x, group=dist.new_group([0]))
    torch.ones(1, requires_grad=True).sum().backward()
    print(x.tolist(), [batch.tolist() for batch in DataLoader([1, 2])], flush=True)
    dist.destroy_process_group()

found = {}
for patched in list(patch.patches):
    for need in patched.needs:
        if describe_missing(need):
            continue  # a patch for an older torch
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
                status = 1
                try:
                    trial(patched, need)
                    status = 0
                except BaseException:
                    import traceback
                    traceback.print_exc()
                finally:
                    sys.stdout.flush(), sys.stderr.flush()
                    os._exit(status)
            os.waitpid(child, 0)
            out.seek(0), err.seek(0)
            found[f"{patched.name} without {need}"] = patched.loses, out.read(), err.read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trials():
    run = subprocess.run([sys.executable, "-c", TRIALS], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_a_patch_whose_need_is_gone_is_left_out_in_one_line_and_groups_work(trials):
    assert len(trials) >= 20
    for trial, (loses, printed, told) in trials.items():
        assert printed == "[1.0, 1.0] [[1], [2]]\n", f"{trial}: {told}"
        lines = told.splitlines()
        assert all("Phalanx is tested with torch 2.13.0, 2.14.1, 2.15.0." in line for line in lines), f"{trial}: {told}"
        assert sum(loses in line for line in lines) == 1, f"{trial}: {told}"
        need = trial.partition(" without ")[2].partition("(")[0]
        assert any(need in line for line in lines), f"{trial}: {told}"


@pytest.mark.slow
def test_every_patch_is_tried(trials):
    """Whoever adds a patch says what it needs, and what is lost without it."""
    assert {trial.partition(" without ")[0] for trial in trials} >= {
        "data_loaders._observe_loaders",
        "data_loaders.call_before_fetch",
        "futures._collect_calls",
        "launched_rank._extend_start",
        "monitored_barrier.extend_monitored_barrier",
        "mpi.patch_mpi",
        "rendezvous_handlers.patch_agent_rendezvous",
        "rendezvous_handlers.patch_launcher_rendezvous",
        "shared_loads.wait_before_loads",
        "stores.patch_file_store",
        "stores.patch_prefix_store",
        "training_steps._observe_backward",
        "training_steps._observe_batches",
        "training_steps._observe_scaler",
    }
