"""Workers of several hosts: network namespaces, with the job's key and without."""

import contextlib
import os
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rpc.on_hosts import _machines, on_hosts
from tests.rpc.workers import Counter, fail, nothing, pid, same, set_event, until, wait_event

from phalanx import rpc
from phalanx._base.processes import read_state
from phalanx.errors import PeerLostError
from phalanx.rpc import current
from phalanx.testing import RankFailed
from phalanx.testing.namespaces import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts work")


def _calls(rank: int) -> int:
    if rank == 0:
        for to in ("w1", "w2"):
            assert rpc.rpc_sync(to, torch.add, (torch.ones(2), 3)).tolist() == [4, 4]
            big = torch.arange(1 << 20)
            assert torch.equal(rpc.rpc_sync(to, same, (big,)), big)
            assert [f.wait() for f in [rpc.rpc_async(to, same, (n,)) for n in range(300)]] == list(range(300))
            with pytest.raises(KeyError):
                rpc.rpc_sync(to, fail, (KeyError("k"),))
            counter = rpc.remote(to, Counter, (1,))
            assert rpc.rpc_sync("w1" if to == "w2" else "w2", _use, (counter,)) == 6
            assert counter.rpc_sync().add(1) == 7
        return rpc.rpc_sync("w2", pid)
    return os.getpid() if rank == 2 else 0


def _use(counter: Any) -> int:
    return counter.rpc_sync().add(5)


def _lose(rank: int) -> None:
    if rank == 2:
        signal.pause()  # until it is killed
    if rank == 1:
        return
    held = rpc.remote("w2", Counter, (1,))
    held.rpc_sync().add(1)
    waiting = [rpc.rpc_async("w2", wait_event, ("never",), timeout=0) for _ in range(3)]
    os.kill(rpc.rpc_sync("w2", pid), signal.SIGKILL)
    for one in waiting:
        with pytest.raises(
            PeerLostError, match=r"rpc_async\(wait_event\) to worker 'w2' \(rank 2, .*its connection broke"
        ):
            one.wait()
    with pytest.raises(PeerLostError, match=r"worker 'w2'"):
        held.to_here()
    assert rpc.rpc_sync("w1", same, (1,)) == 1


@pytest.mark.slow
def test_workers_of_two_hosts_call_each_other():
    found = on_hosts([1, 2], _calls)
    assert found[0] == found[2]


def test_the_loss_of_a_worker_of_another_host_fails_its_calls_by_name():
    on_hosts([2, 1], _lose, lost=[2])


def _stop(rank: int) -> str:
    if rank == 1:
        return wait_event("go on")
    stopped = rpc.rpc_sync("w1", pid)
    os.kill(stopped, signal.SIGSTOP)
    try:
        big = rpc.rpc_async("w1", same, (torch.arange(1 << 23),))  # more than the kernels keep for a process
        assert not threading.Event().wait(2.0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert torch.equal(big.wait(), torch.arange(1 << 23))
    rpc.rpc_sync("w1", set_event, ("go on",))
    return ""


@pytest.mark.slow
def test_a_worker_of_another_host_that_is_stopped_for_a_while_is_not_lost():
    """Silence of 0.8 s was a loss; a busy machine may be silent for longer. What tells is the kernel of its host."""
    on_hosts([1, 1], _stop)


def _cut(rank: int, options: rpc.RpcBackendOptions) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = f"w{1 - rank}"
    assert rpc.rpc_sync(other, same, (1,)) == 1
    waiting = rpc.rpc_async(other, wait_event, ("never",), timeout=0)
    if rank == 0:
        rpc.rpc_sync(other, wait_event, ("calls",))
        _machines[1].cut_off()
    else:
        set_event("calls")
    with pytest.raises(PeerLostError, match=f"to worker '{other}' .*its host no longer answers"):
        waiting.wait()
    set_event("never")  # for the function that runs here
    with pytest.raises(PeerLostError):
        rpc.shutdown()


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_lost_for_those_on_both_sides():
    on_hosts([1, 1], _cut, joining=True)


def test_without_a_key_workers_of_two_hosts_do_not_join():
    with pytest.raises(RankFailed, match=r"AuthenticationError: .*there is no key to authenticate them"):
        on_hosts([1, 1], nothing, key="")


def _join(rank: int, options: rpc.RpcBackendOptions, folder: str) -> None:
    def met() -> bool:
        return rpc.rpc_sync("w1", same, (1,)) == 1

    if rank == 2:
        until(Path(folder, "killed").exists)
        rpc.init_rpc("w1", rank=1, rpc_backend_options=options)
        rpc.rpc_sync("w0", set_event, ("come",))
        wait_event("leave")
        rpc.shutdown()
        until(Path(folder, "left").exists)
        rpc.init_rpc("w1", rank=1, rpc_backend_options=options)  # the same process, once more
        wait_event("leave again")
        rpc.shutdown()
        return
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
    if rank == 1:
        signal.pause()  # until it is killed
    until(met)
    first = rpc.rpc_sync("w1", pid)
    lost = rpc.rpc_async("w1", wait_event, ("never",))
    os.kill(first, signal.SIGKILL)
    until(lambda: read_state(first) in ("", "Z"))  # until then its name is taken
    with pytest.raises(PeerLostError, match="The function may have run there, or not"):
        lost.wait()
    Path(folder, "killed").touch()
    wait_event("come")
    assert rpc.rpc_sync("w1", pid) != first
    rpc.rpc_sync("w1", set_event, ("leave",))
    until(lambda: current.agent().membership.find("w1") is None)
    with pytest.raises(PeerLostError, match=r"worker 'w1' \(rank 1, .* is lost"):
        rpc.rpc_sync("w1", nothing)
    Path(folder, "left").touch()
    until(met)
    rpc.rpc_sync("w1", set_event, ("leave again",))
    until(lambda: current.agent().membership.find("w1") is None)  # it takes its name out of the store, which is here
    rpc.shutdown()


def test_workers_of_two_hosts_join_and_leave_and_come_again(tmp_path: Path) -> None:
    on_hosts([1, 2], _join, str(tmp_path), lost=[1], joining=True)


def _used() -> tuple[int, int]:
    """How many descriptors this process has, and how many bytes of memory."""
    with open("/proc/self/smaps_rollup") as file:
        nbytes = next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return len(os.listdir("/proc/self/fd")), nbytes


def _besiege(rank: int) -> None:
    """Worker 1 connects to worker 0's port as somebody without a key, who has begun to send a frame of 2 GiB."""
    if rank == 0:
        return
    host, _, port = current.agent().membership.find("w0").network.rpartition(":")
    files, nbytes = rpc.rpc_sync("w0", _used)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=10.0))
            with contextlib.suppress(OSError):  # he may be closed by now
                stranger.sendall(greeting + b"\x06" + struct.pack(">Q", 1 << 31))
                stranger.setblocking(False)
                stranger.send(bytes(1 << 20))
            assert rpc.rpc_sync("w0", same, (1,)) == 1
        files_during, nbytes_during = rpc.rpc_sync("w0", _used)
        big = torch.arange(1 << 20)
        assert torch.equal(rpc.rpc_sync("w0", same, (big,)), big)
    assert files_during - files < 150
    assert nbytes_during - nbytes < 64 << 20


@pytest.mark.slow
def test_strangers_at_the_port_of_a_worker_cost_it_few_descriptors_and_little_memory() -> None:
    on_hosts([1, 1], _besiege)
