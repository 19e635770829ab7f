"""What the agents of other hosts say of their ranks reaches the attempt, unless the host has left or is lost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from phalanx._job.agent.environment import Place
from phalanx._job.agent.failure import ExceptionReport
from phalanx._job.hosts.control_channel import ControlMessage
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.leader import RemoteRanks
from phalanx._job.hosts.node_plan import HostFacts, Node
from phalanx._job.hosts.peer_hosts import PeerHosts


class Heard:
    """It stands for the attempt, its display and the channel's clock, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.state = self
        self.phase = "running"

    def to_own_clock(self, member: int, at: float) -> float:
        return at

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


MESSAGES = {
    "started": {"rank": 1, "pid": 31},
    "exit": {"rank": 1, "pid": 31, "status": -9, "at": 1.0, "dump": ""},
    "rank message": {"rank": 1, "pid": 31, "message": {"kind": "lost"}},
    "abandoned": {"rank": 1},
    "report": {"report": asdict(ExceptionReport(1, 31, 1.0, ("ValueError",), "no data", "here", ""))},
}


def make() -> tuple[Heard, PeerHosts, ElasticHosts, Node]:
    nodes = [
        Node(HostFacts(member, "n", 10, 1, "", f"10.0.0.{member}"), Place(at, 2, at, 1, 2, at, 2), f"n{at}")
        for at, member in enumerate((0, 5))
    ]
    heard = Heard()
    channel: Any = heard
    peers = PeerHosts(channel, nodes, nodes[0], 9.0)
    elastic = peers.plan_elastic(None, 0)
    elastic.on_started(1, 31)
    return heard, peers, elastic, nodes[1]


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_host_that_has_left_says_nothing_of_those_that_have_its_slots_now(kind: str) -> None:
    """Its replacement, as a pod, starts with the same numbers of processes: the end of a rank that had left was told
    as that of the one which had just come in its place."""
    display: Any
    for has_left in (False, True):
        heard, peers, elastic, node = make()
        display = attempt = heard
        if has_left:
            peers.lose(5, "it has left")
        ranks = RemoteRanks(peers, elastic, display)
        assert ranks.process(ControlMessage(kind, 5, dict(MESSAGES[kind])), node, attempt)  # type: ignore[arg-type]
        assert bool(heard.told) != has_left


def test_what_its_ranks_have_printed_is_shown_all_the_same() -> None:
    heard, peers, elastic, node = make()
    display: Any = heard
    peers.lose(5, "it has left")
    items = [[1, 1, ["the last line"], "", True]]
    message = ControlMessage("lines", 5, {"items": items})
    assert RemoteRanks(peers, elastic, display).process(message, node, display)
    assert heard.told == ["show", "end"]
