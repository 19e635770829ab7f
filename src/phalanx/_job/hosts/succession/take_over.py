"""`TakeOver` makes an elected host the leader: it collects the state of all ranks, and continues the attempt.

elected ──► hosts report their ranks ──all, or lost──► a LeaderLink instead of the FollowerLink
                                                                └── which removes the former leader
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent.elastic import ElasticRank
from phalanx._job.agent.elastic_actions import LostRank
from phalanx._job.agent.generation import Limits, plan_generation
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.supervision import Supervision
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage, decode_lines
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.leader import LeaderLink
from phalanx._job.hosts.line_forwarder import LineForwarder
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.handover import Handover
from phalanx._job.hosts.succession.host_state import HostState
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.hosts.succession.leader_state import LeaderState
from phalanx._job.hosts.succession.proposer import Proposer
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.output.display import Display

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


class TakeOver:
    """`TakeOver` collects the hosts' reports on their ranks for an elected host.

    Arguments:
        state: the lost leader's decisions.
        lost: the former leader; `why` is the reason for its loss.
        handover: this host's coordinator, and the hosts that had left before the election.
    """

    def __init__(self, state: LeaderState, lost: int, why: str, handover: Handover, channel: ControlChannel) -> None:
        self._state = state.on_own_clock(partial(channel.to_own_clock, lost))
        self._lost = lost
        self._why = why
        self._channel = channel
        self._states: dict[int, HostState] = {}
        others = {node.facts.member for node in state.nodes} - {channel.member, lost}
        self._handover = handover
        self._gone = {member: why for member, why in handover.gone.items() if member in others}
        self._others = others - handover.gone.keys()
        self._later: list[Change | ControlMessage] = []  # messages for the leader's link

    def process(self, message: Change | ControlMessage) -> None:
        """Process a message that arrives while hosts report their ranks."""
        if isinstance(message, ControlMessage) and message.kind == "host state":
            with contextlib.suppress(*MALFORMED):
                reported = HostState.from_json(message.body["state"])
                self._states[message.member] = reported.on_own_clock(
                    partial(self._channel.to_own_clock, message.member)
                )
            return
        if isinstance(message, Change) and message.kind in ("left", "lost"):
            self._others.discard(message.member)
            if message.member == self._lost:
                return
        self._later.append(message)

    @property
    def is_complete(self) -> bool:
        """Return whether all hosts have reported or are lost."""
        return self._others <= self._states.keys()

    def complete(
        self,
        attempt: Attempt,
        plan: JobPlan,
        host: HostResources,
        limits: Limits,
        host_timeout_s: float,
        store: tuple[str, ...],
    ) -> None:
        """Give this host's attempt a leader's link, and continue without the former leader."""
        state, channel, handover = self._state, self._channel, self._handover
        plan = replace(plan, begun=state.job_begun)
        self._states[channel.member] = HostState.of(attempt)
        nodes = list(state.nodes)
        own = next(node for node in nodes if node.facts.member == channel.member)
        peers = PeerHosts(channel, nodes, own, host_timeout_s, limits)
        if all(host.member != self._lost for host in state.slot_plan.hosts):
            peers.lose(self._lost, "it has left")  # on purpose: the job already continues without its ranks
        elastic = restore_elastic(state, self._states, channel.member, limits, host_timeout_s)
        replicas, witness = handover.service.coordinator.replicas, handover.witness
        calls = None if witness is None else WitnessCalls(witness, is_new=False)
        proposer = Proposer(channel, replicas, calls, handover.primary, handover.voter)
        guard = LeadGuard(channel, replicas, host_timeout_s, witness, proposer)
        link = LeaderLink(plan, host, state.attempt, peers, store, guard, elastic, state.begun)
        attempt.become_leader(plan, link, self._restore_supervision(plan, elastic), elastic)
        assert isinstance(host.pump.viewer, LineForwarder)
        host.pump.viewer.lead(host.display)
        link.begin()
        self._show(handover, host.display)
        channel.put_back(self._later)
        link.lose(self._lost, self._why)
        for member, why in self._gone.items():
            link.lose(member, why)

    def _restore_supervision(self, plan: JobPlan, elastic: ElasticHosts) -> Supervision:
        settings = plan.settings
        slots = elastic.generation.slots
        supervision = Supervision(max(slots) + 1, settings.shutdown_timeout_s, settings.exit_timeout_s, is_alone=False)
        supervision.started |= set(elastic.members)
        supervision.retired |= set(range(supervision.world_size)) - set(slots)
        for exit in (*self._state.exits, *(exit for reported in self._states.values() for exit in reported.exits)):
            if exit.rank in slots:
                supervision.on_exit(exit)
        return supervision

    def _show(self, handover: Handover, display: Display) -> None:
        """Show the ranks' output that the lost leader had not read."""
        for member, body in handover.unread:
            for line in body.split(b"\n"):
                message = self._channel.read_line(member, line)
                if message is not None and message.kind == "lines":
                    with contextlib.suppress(*MALFORMED):
                        for rank, stream, lines, _, _ in message.body["items"]:
                            display.show(rank, stream, decode_lines(lines), b"")


def restore_elastic(
    state: LeaderState,
    hosts: Mapping[int, HostState],
    own: int,
    limits: Limits,
    host_timeout_s: float,
) -> ElasticHosts:
    """Restore the job's `ElasticHosts` from the lost leader's decisions and the hosts' reports.

    The result includes the ranks of hosts that have not reported; the caller removes these hosts afterwards.
    """
    elastic = ElasticHosts(state.slot_plan, state.max_replacements, limits, own, host_timeout_s)
    begun = state.begun
    elastic.generation = plan_generation(0, state.slot_plan) if begun is None else begun.generation
    elastic.num_replaced = state.num_replaced
    elastic.losses = list(state.losses)
    for reported in hosts.values():
        elastic.restore_members(reported.ranks, reported.forking)
        elastic.finished |= reported.has_finished
        elastic.has_trained |= reported.has_trained
    ended = {exit.rank for exits in (state.exits, *(reported.exits for reported in hosts.values())) for exit in exits}
    elastic.finished |= bool(state.exits)
    now, wait_s = time.monotonic(), elastic.wait_s
    for part in elastic.generation.parts:
        for slot in part.slots:
            pid = state.pids.get(slot, 0)
            if part.member not in hosts and slot not in ended:
                elastic.restore_members([ElasticRank(slot, pid, joined=True, wait_s=wait_s)], ())
            elif slot not in elastic.members and slot not in elastic.forking and slot not in ended:
                why = "it ended while the job had no leader"
                rank = elastic.rank_of(slot)
                elastic.restore_lost(slot, LostRank(slot, rank, pid, why, now, elastic.generation.number, elastic.step))
    return elastic
