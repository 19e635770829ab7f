"""Calls that are declared idempotent: made again when their worker was lost; and who is found in its place."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.rpc.workers import pid, run_workers, same, until

from phalanx import rpc
from phalanx.errors import ClosedError, DeadlineError, PeerLostError
from phalanx.rpc import current
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers


def _join(name, rank, folder):
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{folder}/store"))


@rpc.functions.idempotent
def _answer_if_second(folder):
    """The first process that runs it never answers."""
    begun = Path(folder, "begun")
    if not begun.exists():
        begun.touch()
        threading.Event().wait()
    return os.getpid()


def _wait_for_ever():
    threading.Event().wait()


def _fail_as_if_lost():
    raise PeerLostError("of another worker")


def _retry(rank, folder):
    if rank == 1:
        _join("w1", 1, folder)
        signal.pause()  # until it is killed
    if rank == 2:
        until(Path(folder, "killed").exists)
        _join("w1", 1, folder)
        signal.pause()
    _join("w0", 0, folder)
    until(lambda: rpc.rpc_sync("w1", same, (1,)) == 1)
    first = rpc.rpc_sync("w1", pid)
    declared = rpc.rpc_async("w1", _answer_if_second, (folder,))
    undeclared = rpc.rpc_async("w1", _wait_for_ever)
    until(Path(folder, "begun").exists)
    with pytest.raises(PeerLostError, match="of another worker"):
        rpc.rpc_sync("w1", _fail_as_if_lost, idempotent=True)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="Whether the function ran there is not known"):
        undeclared.wait()
    Path(folder, "killed").touch()
    while_missing = rpc.rpc_async("w1", pid, idempotent=True)
    second = declared.wait()
    assert second != first
    assert while_missing.wait() == second
    _check_nobody_comes(second)


def _check_nobody_comes(second):
    waiting = rpc.rpc_async("w1", _wait_for_ever, timeout=0, idempotent=True)
    os.kill(second, signal.SIGKILL)
    until(lambda: current.agent().membership.find("w1") is None)
    with rpc.autograd.context(), pytest.raises(PeerLostError):
        rpc.rpc_sync("w1", same, (2,), idempotent=True)
    with pytest.raises(
        DeadlineError, match=r"rpc_sync\(same\) to worker w1: no answer within 0.2 s, in which it was lost 1 times"
    ):
        rpc.rpc_sync("w1", same, (3,), timeout=0.2, idempotent=True)
    with pytest.raises(ValueError, match="Unknown destination worker w9"):
        rpc.rpc_sync("w9", same, (4,), idempotent=True)
    assert current.agent().num_in_flight == 1
    rpc.shutdown(graceful=False)
    with pytest.raises(ClosedError, match="this worker was shut down before another one came in its place"):
        waiting.wait()


def test_a_call_declared_idempotent_is_made_again_when_its_worker_has_come_again():
    run_workers(_retry, 3, lost=[1, 2])


def test_a_worker_that_was_lost_while_it_was_looked_up_does_not_hide_the_next_one():
    """A thread read the entry of a worker in the store, and before it had noted it, another one heard that this worker
    was lost. It noted the dead one, and all calls to that name failed from then on, though another had joined."""
    store = dist.HashStore()
    members = Workers(store, None)
    dead, alive = (WorkerAddress.of_self("w1", 1, "host") for _ in range(2))
    store.set("name/w1", dead.to_json())
    read = members.find("w1")
    assert read == dead
    members.forget(dead)
    members.learn(WorkerAddress.from_json(dead.to_json()))
    assert members.find("w1") is None
    store.set("name/w1", alive.to_json())
    assert members.find("w1") == alive
    members.learn(WorkerAddress.from_json(alive.to_json()))
    members.forget(alive)
    assert members.find("w1") is None
