"""Parameters on servers of two hosts: the gradients and the copies of shards go between them."""

import os
import signal

import pytest
from tests.parameter_server.models import CASES, Model, check_equal, make_server, train, train_alone
from tests.parameter_server.trainers import meet
from tests.rpc.on_hosts import on_hosts
from tests.rpc.workers import pid

from phalanx import rpc
from phalanx.errors import PeerLostError
from phalanx.testing import RankFailed
from phalanx.testing.namespaces import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts work")


def _train(rank, options):
    name = ["t0", "s0", "t1", "s1"][rank]  # a trainer and a server on each host
    rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
    try:
        if name.startswith("t"):
            _train_and_lose_a_server(name)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    with pytest.raises(PeerLostError, match="rank 3"):
        rpc.shutdown()


def _train_and_lose_a_server(name):
    for seed in (1, 2):
        model = Model(seed)
        server = make_server(model, CASES[seed], ["s0", "s1"] if seed == 1 else ["s0"])
        for step in range(6):
            if seed == 1 and step == 3 and name == "t0":
                os.kill(rpc.rpc_sync("s1", pid), signal.SIGKILL)  # its shard's copy is on the other host
            train(server, model, int(name[1]), [step])
        state = server.state_dict()
        train_alone(model, CASES[seed], range(6))
        check_equal(state, model)
        meet(name, f"looked {seed}")
        server.close()
        meet(name, f"closed {seed}")  # before one makes the next of this name


@pytest.mark.slow
def test_training_on_servers_of_two_hosts_has_the_bits_of_one_process_also_when_a_server_is_lost():
    """Dense parameters by SGD with momentum, then Adam; rows of tables by SparseAdam. s1 is killed, and s0 goes on."""
    on_hosts([2, 2], _train, joining=True, lost=[3])


def _train_and_lose_hosts(rank, options):
    name = ["t0", "t1", "s0", "s1", "s2", "s3", "s4", "s5"][rank]
    rpc.init_rpc(name, rank=rank, world_size=8, rpc_backend_options=options)
    try:
        if name.startswith("t"):
            model = Model(2)
            server = make_server(model, CASES[2], [f"s{number}" for number in range(6)])
            for step in range(9):
                for lost in {3: ("s0", "s1"), 6: ("s4", "s5")}.get(step, ()) if name == "t0" else ():
                    os.kill(rpc.rpc_sync(lost, pid), signal.SIGKILL)
                train(server, model, int(name[1]), [step])
            state = server.state_dict()
            train_alone(model, CASES[2], range(9))
            check_equal(state, model)
            meet(name, "looked")
            server.close()
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    with pytest.raises(PeerLostError):
        rpc.shutdown()


@pytest.mark.slow
def test_shards_of_lost_hosts_with_two_servers_each_continue_elsewhere():
    """The copies of a host's shards were on the same host, where that has more than one server."""
    on_hosts([2, 2, 2, 2], _train_and_lose_hosts, joining=True, lost=[2, 3, 6, 7])


def test_servers_of_another_host_are_not_met_without_the_jobs_key():
    with pytest.raises(RankFailed, match=r"AuthenticationError: .*there is no key to authenticate them"):
        on_hosts([2, 2], _train, joining=True, key="")
