"""How workers find each other, and what wrong starts say."""

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.rpc.workers import join, nothing, run_workers, same
from tests.system.phalanx_command import run, write_script

from phalanx import rpc
from phalanx._base.deadline import Deadline
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.errors import ClosedError, DeadlineError
from phalanx.rpc import start, workers
from phalanx.rpc.worker_info import WorkerAddress

_SCRIPT = """
import os
from phalanx import rpc

def where():
    return int(os.environ["RANK"])

rpc.init_rpc(f"w{where()}")
for to in range(3):
    assert rpc.rpc_sync(f"w{to}", where) == to
assert rpc.current.agent().connections.network is None, "a job on one host opens no port"
rpc.shutdown()
rpc.init_rpc(f"again{where()}")
print("met", rpc.rpc_sync("again0", where))
rpc.shutdown()
"""


@pytest.mark.slow
def test_workers_of_phalanx_run_find_each_other_without_an_address(tmp_path: Path) -> None:
    finished = run("--nproc-per-node", "3", write_script(tmp_path, _SCRIPT))
    assert finished.code == 0, finished.err
    assert "met 0" in finished.out


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": ""}, ValueError, "Worker name must match"),
        ({"name": "a b"}, RuntimeError, "Worker name must match"),
        ({"name": 3}, TypeError, "a worker's name is a str"),
        ({"name": "w", "rank": 2, "world_size": 2}, ValueError, "rank 2 of 2"),
        ({"name": "w"}, ValueError, "environment variable RANK expected.*give rank="),
        ({"name": "w", "backend": "tensorpipe"}, TypeError, "must be a member of BackendType"),
        ({"name": "w", "rpc_backend_options": 3}, TypeError, "must be an instance of RpcBackendOptions"),
    ],
)
def test_wrong_arguments_of_init_rpc_are_refused_on_entry(arguments, error, text, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(error, match=text):
        rpc.init_rpc(**arguments)


def test_wrong_options_are_refused():
    for wrong in ({"num_worker_threads": 0}, {"rpc_timeout": -3}, {"max_calls_in_flight": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.RpcBackendOptions(**wrong)
    with pytest.raises(TypeError, match="rpc_timeout is a number of seconds, got a timedelta"):
        rpc.RpcBackendOptions(rpc_timeout=timedelta(seconds=3))
    assert rpc.RpcBackendOptions(rpc_timeout=-1).rpc_timeout == 60, "PyTorch's UNSET_RPC_TIMEOUT"


def _shut_down_alone(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    if rank == 0:
        with pytest.raises(DeadlineError, match=r"not all workers have called it within 0.1 s"):
            rpc.shutdown(timeout=0.1)
        Path(folder, "told").touch()
        with pytest.raises(ClosedError):
            rpc.rpc_sync("w1", nothing)
    else:
        while not Path(folder, "told").exists():
            os.sched_yield()
        rpc.shutdown(graceful=False)


def test_a_shutdown_that_others_do_not_join_ends_when_its_time_is_up():
    run_workers(_shut_down_alone, 2)


def _start_many_times(rank: int, folder: str) -> None:
    old = None
    for n in range(5):
        join(rank, 2, folder)
        if old is not None:
            with pytest.raises(ClosedError, match=r"was shut down since.*Cannot call fork an UserRRef after deletion"):
                rpc.rpc_sync(f"w{1 - rank}", same, (old,))
        old = rpc.remote(f"w{1 - rank}", same, (n,))
        future = rpc.rpc_async(f"w{1 - rank}", same, (n,))
        rpc.shutdown()
        assert future.wait() == n, "a graceful end waits for what is under way"
    assert rpc.is_available()


def test_workers_start_again_after_a_shutdown():
    """A reference from before was handed to a worker of the new start, which looked for its object in vain."""
    run_workers(_start_many_times, 2)


@pytest.fixture(scope="module", autouse=True)
def _libuv_has_its_pipe():
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # libuv keeps a pipe from its first loop on


def _store(kind, folder):
    if kind == "FileStore":
        return dist.FileStore(str(folder / "store"), 2)
    if kind == "TCPStore":
        return dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    return dist.HashStore()


def test_a_worker_whose_rank_0_never_starts_reports_the_address():
    """torch's own error came after 300 s, with C++ stacks before it, and named no rank."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        message = (
            rf"init_rpc on rank 1 of 2: rank 0 did not answer at 127\.0\.0\.1 port {port} within 0\.1 s: the host re"
        )
        with pytest.raises(dist.DistNetworkError, match=message):
            start.open_store(f"tcp://127.0.0.1:{port}", 1, 2, timedelta(seconds=0.1))


class _CountedWaits:
    """A store that tells when it has been waited in twice."""

    def __init__(self, store):
        self._store, self.waits, self.twice = store, 0, threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def wait(self, *arguments):
        self.waits += 1
        if self.waits > 2:
            self.twice.set()
        return self._store.wait(*arguments)


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_a_worker_may_come_late_whatever_the_stores_words_for_that_are(kind, tmp_path, monkeypatch):
    """All were let go when one came more than 5 s after the others: "wait timeout after 5000ms" of a TCPStore was taken
    for a store that had failed, since it does not say "timed out"."""
    monkeypatch.setattr(workers, "_WAIT_S", 0.05)
    store = _CountedWaits(dist.PrefixStore("job", _store(kind, tmp_path)))
    members = [
        WorkerAddress(rpc.WorkerInfo(f"w{i}", i), uid=i, host="h", hostname="h", process=ProcessId.of_self())
        for i in range(2)
    ]
    late = threading.Thread(
        target=lambda: store.twice.wait(60) and store.set("worker/1", members[1].to_json()), name="phalanx-test-late"
    )
    late.start()
    found = workers.Workers(store, 2)
    found.join(members[0], Deadline.after(60), lambda: members[0])
    late.join()
    assert found.find("w1") == members[1]
