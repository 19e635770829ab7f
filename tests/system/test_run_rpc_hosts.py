"""Remote calls in a job of `phalanx run` on two hosts: who is in it can call, and nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.host_commands import commands, finish, numbered
from tests.system.phalanx_command import write_script

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_SCRIPT = """
import os, sys, time, torch
from phalanx import rpc
from phalanx.rpc import current

rank = int(os.environ["RANK"])

def where():
    return int(os.environ["RANK"])

def ask(to):
    return rpc.rpc_sync(f"w{to}", where)

rpc.init_rpc(f"w{rank}")
if rank == 0:
    print("it listens at", current.agent().me.network, flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    assert len(current.agent().membership.members()) == 4
for to in range(4):
    assert ask(to) == to
    assert rpc.rpc_sync(f"w{to}", ask, (3 - rank,)) == 3 - rank
big = torch.arange(1 << 18)
assert torch.equal(rpc.rpc_sync(f"w{3 - rank}", torch.add, (big, 1)), big + 1)
rref = rpc.remote(f"w{(rank + 2) % 4}", torch.add, (torch.ones(2), rank))
assert rpc.rpc_sync(f"w{(rank + 1) % 4}", torch.mul, (rref.to_here(), 2)).tolist() == [2 + 2 * rank] * 2
rpc.shutdown()
print("done", flush=True)
"""

# Says hello as a member would, and asks the worker to make a folder; in the clear, and with the key of another job.
_ATTACK = """
import contextlib, os, pickle, sys, zmq
from phalanx._comm.control.key import Key
from phalanx.rpc import wire
from phalanx.rpc.worker_info import WorkerAddress

address, folder, other_key = sys.argv[1:]
context = zmq.Context()
for key in (None, Key.parse(other_key)):
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    monitor = sock.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    if key is not None:
        pair = key.member_pair()
        sock.curve_publickey, sock.curve_secretkey = pair.public, pair.secret
        sock.curve_serverkey = key.coordinator_pair().public
    sock.connect("tcp://" + address)
    data = pickle.dumps((os.mkdir, (folder,), {}), 5)
    with contextlib.suppress(zmq.Again):  # a refused socket has nobody to send to, and would wait for ever
        sock.send_multipart([b"hello", WorkerAddress.of_self("w1", 1, "host").to_json().encode()], zmq.DONTWAIT)
        sock.send_multipart([wire.head(wire.REQUEST, 1, data, b"", ()), data, b""], zmq.DONTWAIT)
    if not monitor.poll(30_000):
        print("nothing happened", "without a key" if key is None else "with another key", flush=True)
        os._exit(1)  # not through ZeroMQ's end, which may wait
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    sock.disable_monitor()
    monitor.close(0)
    sock.close()
os._exit(0)  # ZeroMQ's end waits for what the worker does with the connections
"""


@pytest.mark.slow
def test_workers_of_two_hosts_call_each_other_and_whoever_has_not_the_key_calls_nobody(tmp_path: Path) -> None:
    """The ranks of the first host, whose agent keeps the job's store, were told no key, so they called nobody."""
    script = write_script(tmp_path, _SCRIPT)
    attacked, made = tmp_path / "attacked", tmp_path / "made"
    with hosts(2) as machines, commands(machines, *numbered(machines, script=(script, str(attacked)))) as jobs:
        address = jobs[0].read_until("it listens at").split()[-1]
        assert address.startswith("10.77.0.1:"), "the address of one interface alone"
        words = (sys.executable, "-c", _ATTACK, address, str(made), str(Key.generate()))
        subprocess.run([*machines[1].command, *words], check=True, timeout=600)
        attacked.touch()
        first, second = finish(jobs)
    assert (first.code, second.code) == (0, 0), first.out
    assert not made.exists(), "somebody without the key ran a function"
    assert "refused a connection from 10.77.0.2" in first.out
