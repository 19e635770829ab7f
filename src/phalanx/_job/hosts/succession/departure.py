"""`Departure` makes the leader of an elastic job leave the job on SIGTERM, so that another host takes over.

SIGTERM ──2 s──┬─ all other hosts receive SIGTERM, too ──► the job ends
               └─ they do not ──► the ranks of this host finish their step and exit ──► another host is elected
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx._job.agent.elastic_actions import LEAVE
from phalanx._job.hosts.elastic_hosts import ElasticHosts
from phalanx._job.hosts.node_plan import Node
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.output.display import Display

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt

_SIGNALS_S = 2.0  # a scheduler that ends a job has signalled all its hosts within this time
_SEND_S = 2.0


class Departure:
    """`Departure` belongs to one attempt. Its stages are stays, asked, and then either leaves and left, or ends.

    Arguments:
        release_host: releases another host from the job; returns whether the remaining hosts continue without it.
    """

    def __init__(
        self,
        peers: PeerHosts,
        elastic: ElasticHosts,
        guard: LeadGuard,
        display: Display,
        release_host: Callable[[Node], bool],
    ) -> None:
        self._peers = peers
        self._elastic = elastic
        self._guard = guard
        self._display = display
        self._release_host = release_host
        self._stage = "stays"
        self._signalled: set[int] = set()  # the members that have received SIGTERM as well
        self.due: float | None = None

    @property
    def has_left(self) -> bool:
        """Return whether this host has left the job, which another host now leads."""
        return self._stage == "left"

    @property
    def is_leaving(self) -> bool:
        """Return whether the job continues without the ranks of this host."""
        return self._stage in ("leaves", "left")

    def request(self, attempt: Attempt) -> bool:
        """Process a SIGTERM at this host; return False if this host cannot leave, so that the job ends."""
        may_be_led = self._guard.is_begun and self._guard.can_continue_with(len(self._peers.present))
        is_possible = attempt.state.phase == "running" and self._elastic.active and may_be_led
        if self._stage != "stays" or not is_possible:
            return False
        self._stage, self.due = "asked", time.monotonic() + _SIGNALS_S
        self._display.print(
            f"phalanx run: SIGTERM: this host leaves, unless all other hosts also receive SIGTERM within "
            f"{_SIGNALS_S:g} s (again: stop the job)"
        )
        return True

    def note_signal(self, node: Node) -> bool:
        """Process a SIGTERM at another host; return whether that host waits for this host's decision."""
        if self._stage == "asked":
            self._signalled.add(node.facts.member)
        return self._stage == "asked"

    def advance(self, attempt: Attempt) -> None:
        if self._stage == "asked":
            is_ending_everywhere = all(node.facts.member in self._signalled for node in self._peers.present)
            if is_ending_everywhere or (self.due is not None and time.monotonic() >= self.due):
                self.due = None
                self._decide(attempt)
        elif self._stage == "leaves" and attempt.state.phase == "running" and self._can_hand_over(attempt):
            self._hand_over()

    def _decide(self, attempt: Attempt) -> None:
        """Leave the job if enough hosts stay and one of them can lead; otherwise end the job."""
        signalled = [node for node in self._peers.present if node.facts.member in self._signalled]
        is_led_on = self._guard.has_standbys  # a standby may be restarting after a loss
        if (
            is_led_on
            and self._guard.can_continue_with(len(self._peers.present) - len(signalled))
            and all(map(self._release_host, signalled))
        ):
            attempt.receive_from_ranks()
            own = self._peers.own
            actions = self._elastic.on_host_leaves(own.facts.member, own.where, time.monotonic())
            if actions is not None:
                self._stage = "leaves"
                attempt.do_elastic(actions)
                for rank in attempt.place.ranks:
                    attempt.links.send(rank, LEAVE)
                self._display.print(
                    "phalanx run: the ranks of this host finish their step and exit; the others continue, and one of "
                    "their hosts leads the job (SIGTERM again: stop the job)"
                )
                return
        self._stage = "ends"
        attempt.on_signal(signal.SIGTERM)

    def _can_hand_over(self, attempt: Attempt) -> bool:
        """Return whether this host is no longer needed: its ranks have ended, and the others train without them."""
        ended = {(exit.rank, exit.pid) for exit in attempt.state.exits.values()}  # some before the request to leave
        if attempt.ranks.processes.pids.items() - ended or not self._guard.has_standbys:
            return False
        return self._elastic.is_waiting or self._elastic.is_regrouped

    def _hand_over(self) -> None:
        self._stage = "left"
        self._guard.hand_over()
        self._peers.channel.put(-1, "transfer leadership")
        self._peers.channel.flush(_SEND_S)
        self._display.print("phalanx run: this host has left the job, which continues on the others")
