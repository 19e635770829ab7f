"""`RemoteRanks` tells the leader's attempt what the agents of other hosts say of their ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from phalanx._job.agent.failure import Exit, Report
from phalanx._job.hosts.control_channel import ControlMessage, decode_lines
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import Node
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.output.display import Display

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


_OF_RANKS = ("started", "abandoned", "exit", "rank says", "report")


class RemoteRanks:
    """`RemoteRanks` handles these messages during one attempt."""

    def __init__(self, peers: PeerHosts, elastic: ElasticHosts, display: Display) -> None:
        self._peers = peers
        self._elastic = elastic
        self._display = display

    def hear(self, message: ControlMessage, node: Node, attempt: Attempt) -> bool:
        """Process a message about ranks of `node`; return whether it was one.

        Raises:
            KeyError, TypeError, ValueError: it makes no sense.
        """
        body = message.body
        if message.kind == "lines":
            self._show(body["items"], node)
        elif message.kind in _OF_RANKS and message.member in self._peers.lost:
            pass  # its seats may be another host's by now, with processes that have the same numbers
        elif message.kind == "started":
            attempt.on_started(_rank_of(body, node), int(body["pid"]))
        elif message.kind == "abandoned":
            attempt.state.on_abandoned(_rank_of(body, node))
        elif message.kind == "exit":
            at = self._peers.channel.to_own_clock(message.member, float(body["at"]))
            rank, pid = _rank_of(body, node), int(body["pid"])
            # A host that was given up, and has come again, may still tell of processes that were there before.
            is_known = self._elastic.pid_of(rank) == pid
            if is_known and (attempt.state.phase == "running" or not self._elastic.is_arriving(rank)):
                attempt.on_exit(Exit(rank, pid, int(body["status"]), at, str(body["dump"])))
        elif message.kind == "rank says":
            attempt.on_rank_message(_rank_of(body, node), int(body["pid"]), dict(body["message"]))
        elif message.kind == "report":
            self._hear_report(message, node, attempt)
        else:
            return False
        return True

    def _show(self, items: list[Any], node: Node) -> None:
        for rank, stream, lines, status, ended in items:
            if rank in node.place.ranks and stream in (1, 2):
                self._display.show(rank, stream, decode_lines(lines), decode_lines([status])[0])
                if ended:
                    self._display.end(rank)

    def _hear_report(self, message: ControlMessage, node: Node, attempt: Attempt) -> None:
        fields = message.body["report"]
        fields["at"] = self._peers.channel.to_own_clock(message.member, float(fields["at"]))
        report = Report.from_bytes(json.dumps(fields).encode())
        if report is not None and self._elastic.pid_of(_rank_of(fields, node)) == report.pid:
            attempt.on_report(report)


def _rank_of(body: dict[str, Any], node: Node) -> int:
    rank = int(body["rank"])
    if rank not in node.place.ranks:
        raise ValueError(f"rank {rank} is not on {node.label}")
    return rank
