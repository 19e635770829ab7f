"""Prepare, on the leader of an attempt, for the loss of the leader, so that the job survives it.

    the hosts change ──► record: the decisions, for a host that takes over
                     └─► update_voters: the hosts that vote, and the candidates
    a host is lost ──► remove ──a majority agrees──► the attempt continues without it

Without voters (a job that is not elastic, or whose agents are all on one host) the job ends with its leader, and lost
hosts are removed at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent.elastic_actions import BeginGeneration
from phalanx._job.agent.failure import Exit
from phalanx._job.agent.generation import SlotPlan
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.control_channel import ControlMessage
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import Node
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.departure import Departure
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.hosts.succession.leader_state import LeaderState
from phalanx._job.output.display import Display

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt

_RECORD_S = 0.2  # ranks that start or end within this time are recorded together


class LeaderSuccession:
    """`LeaderSuccession` is the leader's part in the succession, during one attempt.

    Arguments:
        guard: the job's guard, for all attempts; None if no other host can take over.
        plan, number: the attempt's plan and number.
        begun: the newest generation, if it is not the first.
        remove_host: removes a host; called once a majority agrees, or if no vote is needed.
        release_host: releases another host from the job; returns whether the job continues without it.
    """

    def __init__(
        self,
        guard: LeadGuard | None,
        peers: PeerHosts,
        elastic: ElasticHosts,
        display: Display,
        plan: JobPlan,
        number: int,
        begun: BeginGeneration | None,
        remove_host: Callable[[int, str], object],
        release_host: Callable[[Node], bool],
    ) -> None:
        self.guard = guard or LeadGuard(peers.channel, None)
        self._peers = peers
        self._elastic = elastic
        self._display = display
        self._plan = plan
        self._number = number
        self._begun = begun
        self._remove_host = remove_host
        self.departure = Departure(peers, elastic, self.guard, display, release_host)
        self._attempt: Attempt
        self._num_ended = 0  # how many exits have been recorded
        self._record_at: float | None = None  # when to record the latest changes
        self._is_recorded = False

    def attach(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        return self.guard.fds

    @property
    def due(self) -> float | None:
        """Return when to call `receive` even if no descriptor is ready; None for never."""
        dues = (self.guard.due, self.departure.due, self._record_at)
        return min((at for at in dues if at is not None), default=None)

    def receive(self) -> None:
        """Remove the hosts that a majority has agreed to remove, and record changes that are due.

        Raises:
            LaunchError: a majority has not agreed in time, or has agreed on another leader.
        """
        for line in self.guard.receive():
            self._display.print(f"phalanx run: {line}")
        self._announce_standbys()
        for member, why in self.guard.pop_agreed():
            self._remove_host(member, why)
        num_ended, now = len(self._exits), time.monotonic()
        if self._elastic.finished and self._num_ended != num_ended:
            self._record_at, self._num_ended = self._record_at or now + _RECORD_S, num_ended
        if self._record_at is not None and now >= self._record_at:
            self._record_at = None
            self.record()
            self._change_voters()
        self.departure.advance(self._attempt)

    def process(self, message: ControlMessage) -> bool:
        """Process another host's message if it concerns the succession; return whether it does."""
        if message.kind not in ("datagram", "standby ready"):
            return False
        with contextlib.suppress(*MALFORMED):
            self.guard.process(message)
        return True

    # The hosts change.

    def record(self, begun: BeginGeneration | None = None) -> None:
        """Store the leader's decisions for a host that takes over, before any host is notified of them."""
        if begun is not None:
            self._begun = begun
            self.guard.begin(len(self._elastic.slot_plan.hosts))
        if self.guard.is_begun:
            exits = self._exits.values()
            state = LeaderState.of(self._number, self._plan, self._peers, self._elastic, self._begun, exits)
            self.guard.record(state)

    def update_voters(self) -> None:
        """Make the hosts of a generation voters, after they were notified of the generation."""
        self.guard.set_voters(self._voters)

    def on_elastic_rank(self) -> None:
        """Update the voters and the record, after a rank has reported that the job is elastic."""
        if not self._is_recorded:
            self._is_recorded = True
            self.update_voters()
            self.record()
        self._record_at = self._record_at or time.monotonic() + _RECORD_S

    def on_host_joined(self, member: int) -> None:
        """Send a waiting host, which has no vote, the addresses at which to ask for the leader if this host is lost."""
        self._peers.channel.put(member, "standbys", addresses=self.guard.polling_places)

    def remove(self, member: int, why: str) -> None:
        """Remove a lost host: at once if all its ranks have succeeded, otherwise when a majority agrees."""
        if has_finished(self._peers, member, self._exits) or not self.guard.defer(member, why, self._voters):
            self._remove_host(member, why)
            self._change_voters()

    @property
    def _exits(self) -> Mapping[int, Exit]:
        return self._attempt.state.exits

    @property
    def _voters(self) -> list[int]:
        return find_voters(self._peers, self._elastic.slot_plan, self._exits)

    def _change_voters(self) -> None:
        others_have = all(has_finished(self._peers, node.facts.member, self._exits) for node in self._peers.present)
        is_alone = self._elastic.finished and bool(self._exits) and others_have
        self.guard.update_voters(self._voters, is_alone)

    def _announce_standbys(self) -> None:
        standbys = self.guard.pop_standbys()
        if standbys:
            names = " or ".join(self._peers.others[member].where for member in standbys)
            self._display.print(f"phalanx run: without this host, {names} would lead the job")
            for member in {*self._peers.late, *self._elastic.arrivals}:
                self.on_host_joined(member)


def has_finished(peers: PeerHosts, member: int, exits: Mapping[int, Exit]) -> bool:
    """Return whether all ranks of a host have succeeded, or the host has none in this attempt."""
    node = peers.own if member == peers.own.facts.member else peers.others.get(member)
    return node is None or all(slot in exits and not exits[slot].status for slot in node.place.ranks)


def find_voters(peers: PeerHosts, slot_plan: SlotPlan, exits: Mapping[int, Exit]) -> list[int]:
    """Return the hosts that vote on the leader, which are all present hosts with slots, in the order of candidacy.

    Hosts whose ranks have all succeeded come last, and do not become candidates.
    """
    present = {node.facts.member for node in peers.own_and_present}
    members = [host.member for host in slot_plan.hosts if host.member in present]
    return sorted(members, key=lambda member: has_finished(peers, member, exits))
