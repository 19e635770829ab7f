"""Which hosts vote on the leader of a job, and in which order they would lead."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx._job.agent.failure import Exit
from phalanx._job.agent.generation import HostSlots, SlotPlan
from phalanx._job.hosts.node_plan import HostFacts, plan_nodes
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.leader_succession import find_voters


@pytest.fixture
def peers() -> PeerHosts:
    """Three hosts with a rank each, the first of which leads."""
    nodes = plan_nodes([HostFacts(member, f"host{member}", 1, 1, "", "") for member in range(3)])
    return PeerHosts(cast(Any, SimpleNamespace()), nodes, nodes[0], 1.0)


SLOT_PLAN = SlotPlan.begin([HostSlots(member, member, 1, frozenset([member])) for member in range(3)])
ENDED = [Exit(rank, 1, 0, 0.0) for rank in range(3)]


def test_a_host_whose_ranks_have_all_ended_well_would_lead_last(peers: PeerHosts) -> None:
    assert find_voters(peers, SLOT_PLAN, {}) == [0, 1, 2]
    assert find_voters(peers, SLOT_PLAN, {1: ENDED[1]}) == [0, 2, 1]
    assert find_voters(peers, SLOT_PLAN, {0: ENDED[0], 1: ENDED[1]}) == [2, 0, 1]
    assert find_voters(peers, SLOT_PLAN, {1: Exit(1, 1, 7, 0.0)}) == [0, 1, 2]  # it has failed


def test_a_host_that_is_lost_does_not_vote(peers: PeerHosts) -> None:
    peers.lose(1, "its link is cut")
    assert find_voters(peers, SLOT_PLAN, {1: ENDED[1]}) == [0, 2]
