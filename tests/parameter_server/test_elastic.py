"""Trainers in an elastic job: one that is lost is replaced, and each step of each trainer counts once."""

import functools
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tests.rpc.workers import dismiss, event, pid, run_workers

import phalanx
from phalanx import rpc
from phalanx.elastic.losses import is_loss
from phalanx.errors import PeerLostError, PhalanxError

_TRAINER = """
import functools, os, signal, sys, time
import torch
import torch._dynamo
import phalanx
from phalanx import rpc
from phalanx.parameter_server import requests
from phalanx.parameter_server.shard import PushedGradients

folder, how, computes = sys.argv[1], {"synchronous": sys.argv[2] == "True"}, sys.argv[3] == "True"
if not how["synchronous"]:
    how["max_staleness"] = 2
job = phalanx.init()
name = f"t{job.rank}"
options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=600.0)  # a wait in vain is not ended
rpc.init_rpc(name, rank=job.rank, rpc_backend_options=options)
if os.path.exists(f"{folder}/struck"):
    open(f"{folder}/replaced", "w").close()  # the name is taken
state = phalanx.elastic.State(step=0)
SGD = functools.partial(torch.optim.SGD, lr=1.0)


def strike(step, ids):
    # Rank 1 is killed at step 7, when one of the two servers has its gradients.
    if (job.rank, step) == (1, 7) and not os.path.exists(f"{folder}/struck"):
        open(f"{folder}/struck", "w").close()
        here = ids[ids % 2 == 0] // 2
        gradients = PushedGradients({"d": torch.ones(3)}, {"t": (here, torch.ones(len(here), 2))})
        rpc.rpc_sync("s0", requests.push, ("parameters", 0, name, step, gradients))
        os.kill(os.getpid(), signal.SIGKILL)
    if computes and (job.rank, step) == (0, 7) and not os.path.exists(f"{folder}/computed"):
        open(f"{folder}/computed", "w").close()
        while not os.path.exists(f"{folder}/replaced"):
            time.sleep(0.01)


@phalanx.elastic.run(state)
def train(state):
    server = phalanx.ParameterServer(
        ["s0", "s1"], ["t0", "t1"], dense={"d": torch.zeros(3)}, tables={"t": torch.zeros(7, 2)}, optimizer=SGD,
        reduction="sum", **how,
    )
    ids = torch.tensor([0, 1, 2, 5 - job.rank])
    while server.step < 20:
        server.pull({"t": ids})
        strike(server.step, ids)
        server.push_gradients({"d": torch.ones(3)}, {"t": (ids, torch.ones(4, 2))})
    torch.distributed.barrier()  # all is pushed
    found = server.state_dict()
    torch.distributed.barrier()  # all have looked
    server.close()
    return found


found = train(state)
if job.is_main:
    print("dense", found["dense"]["d"].tolist(), "rows", found["tables"]["t"][:, 0].tolist(), "step", found["step"])

rpc.shutdown()
"""


def _work(rank, folder, synchronous, computes):
    name = ["s0", "s1", "driver"][rank]
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(name, rank=10 + rank, rpc_backend_options=options)
    if rank < 2:
        event("it is over").wait(600)  # what calls it serves meanwhile
        rpc.shutdown()
        return ""
    while len(rpc.current.agent().membership.members()) < 3:
        pass
    script = Path(folder, "train.py")
    script.write_text(_TRAINER)
    launcher = Path(sysconfig.get_path("scripts"), "phalanx")
    command = [sys.executable, str(launcher), "run", "--nproc-per-node", "2", str(script), folder]
    command += [str(synchronous), str(computes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    for server in ("s0", "s1"):
        dismiss(server, "it is over")
    rpc.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(folder, "struck").exists()
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("computes", [False, True])
def test_a_trainer_that_is_lost_is_replaced_and_nothing_is_pushed_twice(synchronous, computes):
    """Who came in its place took the largest of its servers' clocks: what it had not pushed to all was never pushed.

    Where the other trainer had computed until the replacement had the lost one's name, the server took the two for the
    same trainer: the survivor waited for its push, and the replacement for the survivor.
    """
    output = run_workers(_work, 3, synchronous, computes)[2]
    assert "dense [-40.0, -40.0, -40.0] rows [-40.0, -40.0, -40.0, 0.0, -20.0, -20.0, 0.0]" in output


def _lose_all_servers_of_a_shard(rank, folder, replicate):
    servers = ["s0", "s1", "s2"]
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(["t0", *servers][rank], rank=rank, rpc_backend_options=options)
    if rank:
        event("it is over").wait(600)
        rpc.shutdown(graceful=False)
        return
    while len(rpc.current.agent().membership.members()) < 4:
        pass

    def make():
        dense = {name: torch.zeros(3) for name in "abc"}
        optimizer = functools.partial(torch.optim.SGD, lr=1.0)
        return phalanx.ParameterServer(servers, ["t0"], dense=dense, optimizer=optimizer, replicate=replicate)

    server = make()
    for _ in range(3):
        server.pull()
        server.push_gradients({name: torch.ones(3) for name in "abc"})
    killed = servers[1:] if replicate else ["s1"]
    for number in [rpc.rpc_sync(name, pid) for name in killed]:
        os.kill(number, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="shard 1 is lost") as lost:
        server.pull()
    with pytest.raises(PhalanxError, match="'t0' has pushed 3 steps, and shard 1 has 0 of them") as refused:
        make()
    assert not is_loss(refused.value)  # an elastic job went on after it, and came here again, twenty times
    assert "from a checkpoint" in str(lost.value)
    assert "Resume from a checkpoint. " in str(refused.value)
    assert "replicate=True" not in str(lost.value)
    assert ("With replicate=True, another server has a copy" in str(refused.value)) != replicate
    assert ("its replica's server are both lost" in str(refused.value)) == replicate
    for name in sorted({*servers} - {*killed}):
        dismiss(name, "it is over")
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("replicate", [False, True])
def test_a_shard_that_is_lost_with_any_copy_does_not_begin_anew_unnoticed(replicate):
    """The trainers of an elastic job, which make the ParameterServer again, had it made on another server: its
    parameters were the first ones, and the job went on from step 0. replicate=True was advised where it was on."""
    run_workers(_lose_all_servers_of_a_shard, 4, replicate, lost=[2, 3] if replicate else [2])
