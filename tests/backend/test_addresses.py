"""Where a host can be reached: asked of its interfaces, tried by connecting."""

import socket

import pytest

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.rendezvous import own_addresses, reachable
from phalanx.testing import hosts, run_ranks, why_no_hosts


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_loopback_address_comes_last():
    assert own_addresses()[-1].startswith("127.")
    assert len(set(own_addresses())) == len(own_addresses())


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_the_address_of_an_interface_is_found():
    def look(rank, world_size, machines):
        machines[rank].enter()
        return own_addresses()[0] == machines[rank].address

    with hosts(2) as machines:
        assert run_ranks(look, 2, machines, init=False) == [True, True]


def test_the_first_address_that_answers_is_taken(port):
    assert reachable(["127.0.0.2", "127.0.0.1"], port, Deadline.after(10)) == "127.0.0.1"


def test_no_answer_in_time_is_no_address(port):
    assert reachable(["127.0.0.2"], port, Deadline.after(0.05)) == ""
