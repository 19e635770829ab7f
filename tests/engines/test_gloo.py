"""The Gloo engine: messages between processes, and an end that wakes whoever waits."""

import errno
import multiprocessing
import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from tests.engines.gloo_engines import WAIT, engine_of
from tests.on_ranks import on_ranks

from phalanx._comm.engines.gloo import local_address
from phalanx.testing import run_ranks


@on_ranks(2)
def test_messages_with_one_tag_arrive_in_order(rank, world_size):
    engine = engine_of(rank, world_size)
    mine = [torch.tensor([float(i)]) for i in range(3)]
    got = [torch.empty(1) for _ in range(3)]
    pending = [engine.send(1 - rank, t, 5) for t in mine] + [engine.recv(1 - rank, t, 5) for t in got]
    for one in pending:
        one.wait(WAIT)
    assert [t.item() for t in got] == [0.0, 1.0, 2.0]


def test_a_receive_from_anybody_says_who_it_was():
    def check(rank, world_size):
        engine = engine_of(rank, world_size)
        if rank:
            engine.send(0, torch.tensor([float(rank)]), 1).wait(WAIT)
            return None
        seen = {}
        for _ in range(2):
            got = torch.empty(1)
            pending = engine.recv_any(got, 1)
            pending.wait(WAIT)
            seen[pending._source_rank()] = got.item()
        return seen

    assert run_ranks(check, 3)[0] == {1: 1.0, 2: 2.0}


@on_ranks(2)
def test_close_wakes_the_waits_of_this_rank_and_of_its_peers(rank, world_size):
    engine = engine_of(rank, world_size)
    pending = engine.recv(1 - rank, torch.empty(1), 1)
    closing = threading.Timer(0.1, engine.close) if rank == 0 else None
    if closing is not None:
        closing.start()
    with pytest.raises(RuntimeError):
        pending.wait(WAIT)
    if closing is not None:
        closing.join()


def test_close_wakes_everybody_also_where_a_peer_has_closed_before():
    """It closed by a wait that times out, for the next rank; where that rank had closed already, the wait failed at
    once and closed nothing: who waited for this rank, or in it, waited until its time was up.
    """

    def check(rank, world_size):
        engine = engine_of(rank, world_size)
        if rank == 1:
            engine.close()
            return True
        with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):  # and not that time ran out
            engine.recv(1 if rank == 0 else 0, torch.empty(1), 1).wait(WAIT)
        engine.close()
        if rank == 2:
            woken.set()
        return woken.wait(10.0)  # the end of rank 0's process would close the connection as well

    woken = multiprocessing.get_context("fork").Event()
    assert run_ranks(check, 3) == [True] * 3


def test_the_local_address_is_the_one_on_the_way():
    assert local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        local_address("no-such-host.invalid")


def connects(place, source=None):
    """Whether somebody takes a connection there at once; the kernel answers before the process does."""
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as stranger:
        if source is not None:
            stranger.bind((source, 0))
        stranger.settimeout(0.3)
        try:
            stranger.connect(place)
        except TimeoutError:
            return False
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
@on_ranks(2)
def test_the_port_takes_connections_only_while_a_group_connects(rank, world_size):
    first, second = (engine_of(rank, world_size, f"group {n}") for n in range(2))
    (place,) = first._device.ports
    closed = [connects(place)]
    with first._device.connecting():
        with first._device.connecting():
            pass
        opened = connects(place)
    closed.append(connects(place))
    third = engine_of(rank, world_size, "a later group")  # it opens by itself
    same = third._device is first._device is second._device
    got = []
    for engine in (first, second, third):
        mine, other = torch.tensor([float(rank)]), torch.empty(1)
        pending = [engine.send(1 - rank, mine, 5), engine.recv(1 - rank, other, 5)]
        for one in pending:
            one.wait(WAIT)
        got.append(other.item())
    dist.barrier()
    for engine in (first, second, third):
        engine.close()
        engine.free()
    assert (closed, opened, connects(place), same, got == [float(1 - rank)] * 3) == (
        [False, False],
        True,
        False,
        True,
        True,
    )


def refused(place):
    with socket.socket() as stranger:
        stranger.settimeout(5.0)
        return stranger.connect_ex(place) == errno.ECONNREFUSED


@pytest.mark.slow
@on_ranks(2)
def test_the_port_is_closed_with_the_last_group(rank, world_size):
    first, second = (engine_of(rank, world_size, f"group {n}") for n in range(2))
    (place,) = first._device.ports
    ended = []
    for engine in (first, second):
        engine.close()
        engine.free()
        ended.append(refused(place))
    assert ended == [False, True]
