"""Where tensors may be sent: what is decided from the ranks' addresses alone."""

from dataclasses import replace

from phalanx import Options
from phalanx._comm.backend.create import _public_address_problem
from phalanx._comm.rendezvous.rank_info import RankInfo
from phalanx._comm.symmetric_memory.watch import ProcessId

RANK = RankInfo("host", "node1", "", ProcessId.of_self(), frozenset({0}), 0, address="10.0.0.1")


def test_a_public_address_among_private_ones_is_named_with_its_host_and_what_to_do():
    said = _public_address_problem([RANK, replace(RANK, hostname="node2", address="8.8.8.8")], Options())
    assert said.startswith("tensors would be sent to and from 8.8.8.8 on node2: a public address, which anyone")
    assert "WireGuard" in said
    assert "PHALANX_ALLOW_PUBLIC_ADDRESS=1" in said


def test_private_addresses_other_engines_and_those_who_ask_for_it_are_left_alone():
    public = [RANK, replace(RANK, address="2a00:1450:4001::1")]
    assert _public_address_problem([RANK, replace(RANK, address="")], Options()) == ""
    assert _public_address_problem(public, Options(engine="mpi")) == ""
    assert _public_address_problem(public, Options(allow_public_address=True)) == ""
    assert _public_address_problem(public, Options()) != ""
