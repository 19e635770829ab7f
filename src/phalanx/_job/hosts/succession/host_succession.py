"""`HostSuccession` keeps a follower in the job when the leader is lost.

leader lost ──┬─ ranks run on this host ──► `FollowerSuccession`: the ranks wait for the result of the election
              ├─ all ranks have succeeded ► await_leader: this host votes, and follows the elected leader
              └─ otherwise ───────────────► await_leader: this host has no vote, and joins the elected leader
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx._base.host_addresses import OwnAddress, find_interface
from phalanx._comm.control.address import Address
from phalanx._comm.control.wire import MALFORMED
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import LedAttempt
from phalanx._job.agent.plan import JobPlan
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.control_channel import ControlMessage, without_own_changes
from phalanx._job.hosts.first_host import run_interruptibly
from phalanx._job.hosts.gather import Gathering
from phalanx._job.hosts.job_membership import JobMembership
from phalanx._job.hosts.leader import LeaderLink
from phalanx._job.hosts.succession.follower_succession import FollowerSuccession
from phalanx._job.hosts.succession.handover import ElectedLeader
from phalanx._job.hosts.succession.host_state import HostState
from phalanx._job.hosts.succession.leader_notice import LeaderNotice
from phalanx._job.hosts.succession.moved_job import JobMovedError
from phalanx._job.hosts.succession.successor import Successor
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._job.hosts.follower import FollowerLink

_PAUSE_S = 0.1
_OBSERVE_S = 2.0


class HostSuccession:
    """`HostSuccession` is a follower's part in the succession, for all attempts of the job.

    Arguments:
        on_moved: called with the address of each host that becomes the leader.
    """

    def __init__(
        self,
        membership: JobMembership,
        rendezvous: Rendezvous,
        host: HostResources,
        on_moved: Callable[[str], object],
    ) -> None:
        self._membership = membership
        self._channel = membership.channel
        self._rendezvous = rendezvous
        self._host = host
        self._on_moved = on_moved
        self._notice: LeaderNotice | None = None  # once this host leads the job
        self._successor = self._make_successor()
        self._finished: tuple[FollowerLink, HostState] | None = None  # an attempt whose ranks have succeeded here
        self._newest: FollowerSuccession | None = None  # the succession of the newest attempt
        self.has_left = False  # this host has led the job, and left it to another leader

    def process(self, message: ControlMessage) -> None:
        """Process the leader's message while this host has no ranks.

        Raises:
            JobMovedError: another host leads the job, and no rank has started here.
        """
        with contextlib.suppress(*MALFORMED):
            if message.kind == "standbys":
                self._successor.note_standbys(message.body)
            elif message.kind == "datagram":
                self._successor.vote(message.member, message.body)
        if message.kind == "moved":
            raise JobMovedError(printable(str(message.body["address"])))

    def begin_attempt(self, plan: JobPlan) -> FollowerSuccession:
        """Return this host's part in the succession for an attempt whose ranks are about to start here."""
        self._finished = None
        self._newest = FollowerSuccession(self._successor, self._membership, plan, self._host, self._follow)
        return self._newest

    def end_attempt(self, attempt: Attempt, link: FollowerLink) -> None:
        """Keep the state of an attempt whose ranks have all succeeded here: a new leader needs it."""
        if link.has_finished:
            self._finished = link, HostState.of(attempt)

    def await_leader(self, why: str) -> bool:
        """Wait until another host is elected, and follow it; return False if none is elected, or the result is unknown.

        This host votes if its ranks have all succeeded. Otherwise it has no vote, and joins as a new host: it was
        waiting to be accepted, or its ranks were starting.
        """
        successor, finished = self._successor, self._finished
        votes = finished is not None and successor.begin_election(is_candidate=False)
        if not (votes or successor.observe_election()):
            return False
        log = self._host.display.print
        log(f"phalanx run: this host waits while the others elect another leader: {why}")
        over, when = threading.Event(), "while another leader was elected"
        elected = run_interruptibly(self._host, over, lambda log: successor.await_result(over), when)
        successor.end_election()
        if elected is None:
            return False
        self._follow(elected)
        if votes and finished is not None:
            link, state = finished
            self._channel.put_back(without_own_changes(self._channel.receive()))
            self._channel.put(elected.member, "host state", state=state.to_json())
            link.send_records()
        else:
            try:
                self._membership.rejoin()
            except PhalanxError:
                return False
            self.renew()
        log(f"phalanx run: the host at {Address.parse(elected.address).host} leads the job now; this host waits there")
        return True

    def rejoin(self, over: threading.Event) -> bool:
        """Join the job at a leader that was elected meanwhile; return False if there is none. This may take seconds.

        Raises:
            PhalanxError: the elected leader does not answer.
        """
        successor = self._successor
        if not successor.observe_election(_OBSERVE_S):
            time.sleep(_PAUSE_S)
            return False
        elected = successor.await_result(over)
        successor.end_election()
        if elected is None:
            return False
        self._follow(elected)
        self._membership.rejoin()
        return True

    def renew(self) -> None:
        """Start over as a new voter, after this host has joined the job as a new member."""
        self._membership.update()
        self._successor.close()
        self._successor = self._make_successor()

    def lead(self, attempt: Attempt) -> int:
        """Lead the job to its end, after this host has led an attempt to its end; return the exit code."""
        membership, handover = self._membership, self._successor.handover
        job = membership.job_spec.rendezvous
        link, report = attempt.link, None if self._newest is None else self._newest.report
        assert handover is not None
        assert membership.key is not None
        assert isinstance(link, LeaderLink)
        rendezvous = replace(
            self._rendezvous,
            endpoint=str(handover.service.address),
            leads=True,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            join_timeout_s=job.join_timeout_s,
            last_call_s=job.last_call_s,
            host_timeout_s=job.host_timeout_s,
        )
        port = handover.service.address.port if handover.service.address is not None else 0
        own = OwnAddress(membership.address, find_interface(membership.address))
        gathering = Gathering(
            attempt.plan, rendezvous, self._host, self._channel, membership.key, [own], port, link.guard
        )
        gathering.continue_attempt(link)
        code = gathering.lead(handover.service.local, LedAttempt(attempt, report))
        self.has_left = gathering.has_left
        return code

    def close(self) -> None:
        """Close everything except the coordinator of an elected host, which serves until `close_coordinator`."""
        if self._notice is not None:
            self._notice.close()
        self._successor.close()

    def close_coordinator(self) -> None:
        """Close the job's coordinator, if this host was elected."""
        self._successor.close_coordinator()

    def _make_successor(self) -> Successor:
        membership = self._membership
        timeout_s = membership.job_spec.rendezvous.host_timeout_s
        return Successor(membership.channel, membership.key, membership.address, timeout_s)

    def _follow(self, elected: ElectedLeader) -> None:
        """Move this host's ranks to the coordinator of the elected leader.

        If this host is the elected leader, also publish its address where the job began.
        """
        membership = self._membership
        self._on_moved(elected.address)
        if elected.member == self._channel.member and membership.key is not None:
            self._notice = LeaderNotice(membership.job_spec.endpoints, membership.key, elected.address)
        membership.follow(elected.epoch)
