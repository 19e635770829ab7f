"""Who gets which ranks, and what hosts are called."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from phalanx._base.host_addresses import is_own, own_addresses
from phalanx._job.hosts.control_channel import ControlMessage, decode_lines, encode_lines
from phalanx._job.hosts.follower import show_host_lost
from phalanx._job.hosts.node_plan import HostFacts, find_conflict, find_node, make_distinct, plan_nodes
from phalanx._job.output.display import Display


def host(member: int, num_ranks: int = 1, role: str = "default", node_rank: int | None = None) -> HostFacts:
    return HostFacts(member, f"n{member}", 1, num_ranks, role, f"10.0.0.{member}", node_rank)


def test_ranks_are_numbered_host_by_host_in_the_order_of_coming() -> None:
    nodes = plan_nodes([host(0, 2), host(5, 1), host(3, 3)])
    assert [node.facts.member for node in nodes] == [0, 5, 3]
    assert [list(node.place.ranks) for node in nodes] == [[0, 1], [2], [3, 4, 5]]
    assert {(node.place.world_size, node.place.num_nodes) for node in nodes} == {(6, 3)}
    assert [node.place.node for node in nodes] == [0, 1, 2]


def test_hosts_with_a_number_stand_there_and_the_others_fill_the_gaps() -> None:
    nodes = plan_nodes([host(0), host(1, node_rank=3), host(2), host(3, node_rank=1)])
    assert [node.facts.member for node in nodes] == [0, 3, 2, 1]


def test_numbers_with_gaps_are_closed_up() -> None:
    """--nnodes 1:4 may begin without some of the numbers."""
    nodes = plan_nodes([host(0, node_rank=0), host(1, node_rank=3)])
    assert [(node.facts.member, node.place.node, list(node.place.ranks)) for node in nodes] == [
        (0, 0, [0]),
        (1, 1, [1]),
    ]


def test_ranks_of_a_role_have_numbers_of_their_own() -> None:
    nodes = plan_nodes([host(0, 2, "train"), host(1, 1, "check"), host(2, 2, "train")])
    assert [(node.place.first_role_rank, node.place.role_world_size) for node in nodes] == [(0, 4), (0, 1), (2, 4)]


def test_two_hosts_with_one_number_are_named() -> None:
    conflict = find_conflict([host(0, node_rank=0), host(1, node_rank=1), host(2, node_rank=1)], 3)
    assert (
        conflict
        == "n1 (10.0.0.1) and n2 (10.0.0.2) were both started with --node-rank 1. Give each host its own number"
    )
    assert (
        find_conflict([host(0), host(1, node_rank=2)], 2)
        == "n1 (10.0.0.1) was started with --node-rank 2, but --nnodes 2 numbers the hosts from 0 to 1"
    )
    assert find_conflict([host(0), host(1, node_rank=1)], 2) == ""
    assert find_conflict([host(0, node_rank=0), host(1)], 2) == ""
    assert find_conflict([host(1, node_rank=1), host(0, node_rank=0)], 2) == "", "the successor of a lost first host"
    assert "n1 (10.0.0.1) was started with --node-rank 0, but" in find_conflict([host(0), host(1, node_rank=0)], 2)


def test_hosts_that_were_given_different_numbers_of_hosts_are_named() -> None:
    two, three, any_number = (replace(host(n), nnodes=nnodes) for n, nnodes in enumerate(("2", "3", "")))
    conflict = find_conflict([two, any_number, three], 2)
    assert conflict == (
        "n0 (10.0.0.0) was started with --nnodes 2, and n1 (10.0.0.1) with --nnodes 3. "
        "Give the same number on all hosts"
    )
    assert find_conflict([two, any_number, two], 2) == ""


def test_what_another_host_calls_itself_can_move_no_cursor() -> None:
    sneaky = replace(host(1, role="train\r", node_rank=5), name="n1\x1b[2J\nphalanx run: n2 (10.0.0.2) is lost")
    seen = HostFacts.from_json(1, sneaky.to_json())
    assert seen is not None
    assert seen.role == "train\\r"
    conflict = find_conflict([host(0), seen], 2)
    assert conflict.startswith(
        "n1\\x1b[2J\\nphalanx run: n2 (10.0.0.2) is lost (10.0.0.1) was started with --node-rank 5"
    )
    assert plan_nodes([host(0), replace(seen, node_rank=None)])[1].where.isprintable()


def test_what_the_first_host_calls_another_forges_no_line_here() -> None:
    said: list[str] = []

    class Screen:
        print = staticmethod(said.append)

    body = {"host": "n1\x1b[2J\nphalanx run: done", "ranks": [1], "why": "gone\n\x07"}
    show_host_lost(ControlMessage("host lost", 0, body), cast("Display", Screen()))
    assert said == ["phalanx run: n1\\x1b[2J\\nphalanx run: done, with rank 1, is lost: gone\\n\\x07"]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["a.x.org", "b.x.org"], ["a", "b"]),
        (["a.x.org", "a.y.org"], ["a.x.org", "a.y.org"]),
        (["box", "box", "other"], ["box#0", "box#1", "other"]),
    ],
)
def test_hosts_are_told_apart(names: list[str], labels: list[str]) -> None:
    assert make_distinct(names) == labels


def test_ranks_lead_to_their_host_if_they_have_one_in_common() -> None:
    nodes = plan_nodes([host(0, 2), host(1, 2)])
    assert find_node(nodes, [2, 3]) is nodes[1]
    assert find_node(nodes, [1, 2]) is None


def test_facts_come_back_from_json_and_others_are_no_agents() -> None:
    facts = host(4, 2, "r", 1)
    assert HostFacts.from_json(4, facts.to_json()) == facts
    assert HostFacts.from_json(4, {**facts.to_json(), "num_ranks": "many"}) is None
    assert HostFacts.from_json(4, {"kind": "first"}) is None


def test_lines_travel_whatever_bytes_they_have() -> None:
    lines = [b"plain", "caf\u00e9".encode(), bytes(range(256)), b""]
    assert decode_lines(encode_lines(lines)) == lines


def test_the_loopback_is_this_hosts_and_a_documentation_address_is_not() -> None:
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    assert not is_own("192.0.2.1")  # RFC 5737
    assert own_addresses()[-1].is_loopback
