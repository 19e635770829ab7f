"""The Gloo engine: messages between processes, and an end that wakes whoever waits."""

import errno
import multiprocessing
import random
import socket
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import phalanx.engines.gloo_device as gloo_device_module
from phalanx.engines.gloo import GlooEngine, local_address
from phalanx.engines.gloo_device import gloo_device
from phalanx.testing import run_ranks

WAIT = timedelta(seconds=20)


def engine_of(rank, world_size, name="engine", peers=()):
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    engine = GlooEngine(store, rank, world_size, WAIT, address="127.0.0.1", peers=peers)
    # A rank may close its engine at once, while another is still connecting to it, and that one's start fails.
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{r}" for r in range(world_size)], WAIT)
    return engine


def test_messages_with_one_tag_arrive_in_order():
    def check(rank, world_size):
        engine = engine_of(rank, world_size)
        mine = [torch.tensor([float(i)]) for i in range(3)]
        got = [torch.empty(1) for _ in range(3)]
        pending = [engine.send(1 - rank, t, 5) for t in mine] + [engine.recv(1 - rank, t, 5) for t in got]
        for one in pending:
            one.wait(WAIT)
        return [t.item() for t in got]

    assert run_ranks(check, 2) == [[0.0, 1.0, 2.0]] * 2


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


def test_close_wakes_the_waits_of_this_rank_and_of_its_peers():
    def check(rank, world_size):
        engine = engine_of(rank, world_size)
        pending = engine.recv(1 - rank, torch.empty(1), 1)
        closing = threading.Timer(0.1, engine.close) if rank == 0 else None
        if closing is not None:
            closing.start()
        with pytest.raises(RuntimeError):
            pending.wait(WAIT)
        if closing is not None:
            closing.join()
        return True

    assert run_ranks(check, 2) == [True, True]


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
def test_the_port_takes_connections_only_while_a_group_connects():
    def check(rank, world_size):
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
        return closed, opened, connects(place), same, got == [float(1 - rank)] * 3

    assert run_ranks(check, 2) == [([False, False], True, False, True, True)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_while_a_group_connects_only_its_hosts_are_let_in_and_after_a_while_everybody(monkeypatch, loopback):
    """A host whose address is translated on the way has a second try; strangers have none in most starts."""

    def check(rank, world_size):
        device = gloo_device(loopback, "")
        (place,) = device.ports
        with device.connecting(["10.9.8.7", "fd77::7", "127.0.0.77", loopback]):
            known = connects(place)
        with device.connecting(["10.9.8.7", "fd77::7", "127.0.0.77"]):
            unknown = connects(place)
            with device.connecting(["10.1.1.1", loopback]):
                known_by_another = connects(place)
            unknown_again = connects(place)
        with device.connecting(["a-name", "10.9.8.7"]):  # nobody can say who that is
            unsaid = connects(place)
        monkeypatch.setattr(gloo_device_module, "_KNOWN_ONLY_S", 0.0)
        with device.connecting(["10.9.8.7"]) as all_listen:  # some rank is late: nobody can connect with it yet
            late = connects(place)
            all_listen()
            while not connects(place):
                pass
        monkeypatch.setattr(gloo_device_module, "_EACH_KNOWN_ONLY_S", 1.0)
        with device.connecting(["10.9.8.7"], 1000) as all_listen:
            all_listen()
            large = connects(place)
        return known, unknown, known_by_another, unknown_again, unsaid, late, large, connects(place)

    assert run_ranks(check, 1) == [(True, False, True, False, True, False, False, False)]


def test_ranks_that_come_from_other_addresses_than_they_have_said_meet_a_little_later(monkeypatch):
    def check(rank, world_size):
        monkeypatch.setattr(gloo_device_module, "_KNOWN_ONLY_S", 0.2)
        engine = engine_of(rank, world_size, peers=["10.9.8.7"])
        mine, other = torch.tensor([float(rank)]), torch.empty(1)
        for one in [engine.send(1 - rank, mine, 5), engine.recv(1 - rank, other, 5)]:
            one.wait(WAIT)
        return other.item()

    assert run_ranks(check, 2) == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
def test_the_program_takes_exactly_whom_it_should():
    """Drawn addresses, a listening socket for each, and connections from neighbours of the last bit."""
    rng = random.Random(5)
    for _ in range(20):
        known = {
            f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
            for _ in range(rng.randrange(1, 40))
        }
        device = gloo_device("127.0.0.1", "")
        (place,) = device.ports
        with device.connecting([*known, "fd00::1"]):
            for address in rng.sample(sorted(known), min(3, len(known))):
                assert connects(place, address)
            near = ".".join([*address.split(".")[:3], str(int(address.split(".")[3]) ^ 1 or 3)])
            assert connects(place, near) == (near in known)


def refused(place):
    with socket.socket() as stranger:
        stranger.settimeout(5.0)
        return stranger.connect_ex(place) == errno.ECONNREFUSED


@pytest.mark.slow
def test_the_port_is_closed_with_the_last_group():
    def check(rank, world_size):
        first, second = (engine_of(rank, world_size, f"group {n}") for n in range(2))
        (place,) = first._device.ports
        ended = []
        for engine in (first, second):
            engine.close()
            engine.free()
            ended.append(refused(place))
        return ended

    assert run_ranks(check, 2) == [[False, True]] * 2
