"""`FollowerSuccession` keeps the ranks of a follower alive when the leader is lost.

The ranks keep their processes and wait while the hosts elect another leader. If this host is elected, its attempt gets
a leader's link; otherwise this host reports the state of its ranks to the elected host, and follows that host.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx._comm.control.address import Address
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent.generation import Limits
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import begin_report
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.control_channel import Change, ControlMessage, without_own_changes
from phalanx._job.hosts.job_membership import JobMembership
from phalanx._job.hosts.succession.handover import ElectedLeader
from phalanx._job.hosts.succession.host_state import HostState
from phalanx._job.hosts.succession.leader_state import LeaderState
from phalanx._job.hosts.succession.successor import Successor
from phalanx._job.hosts.succession.take_over import TakeOver
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt
    from phalanx._job.agent.job_report import JobReport


class Leadership(enum.Enum):
    """A `Leadership` states which host leads the job, as far as a follower knows.

    KNOWN ──lost──► ELECTING ──┬─ another host is elected ──► KNOWN
      ▲                │       ├─ this host is ──► TAKING_OVER ──all hosts have reported their ranks──► OWN
      │                │       └─ no host is ──► NONE
      └── RESUMED ◄────┘ the leader answers again
    """

    KNOWN = "another host"
    ELECTING = "not decided yet"
    RESUMED = "the same host again: messages that arrived meanwhile are not processed yet"
    TAKING_OVER = "this host, once all others have reported their ranks"
    OWN = "this host"
    NONE = "no host: the ranks end"


class FollowerSuccession:
    """`FollowerSuccession` is a follower's part in the succession, during one attempt.

    Arguments:
        follow: moves this host to the coordinator of an elected leader.
    """

    def __init__(
        self,
        successor: Successor,
        membership: JobMembership,
        plan: JobPlan,
        host: HostResources,
        follow: Callable[[ElectedLeader], object],
    ) -> None:
        self.leadership = Leadership.KNOWN
        self.report: JobReport | None = None  # the job's report, if this host leads the job now
        self.loss = ""  # why the leader is lost and no other host was elected
        self._successor = successor
        self._membership = membership
        self._channel = membership.channel
        self._plan = plan
        self._host = host
        self._follow = follow
        self._lost = self._channel.first  # the member that led until now
        self._why = ""
        self._early: list[Change | ControlMessage] = []  # messages that arrived during the election
        self._take_over: TakeOver | None = None
        self._attempt: Attempt

    def attach(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        check = self._successor.witness_check
        return (self._successor.fileno(), *(() if check is None else (check.fileno(),)))

    @property
    def is_open(self) -> bool:
        """Return whether the ranks wait, because no host leads yet."""
        return self.leadership in (Leadership.ELECTING, Leadership.TAKING_OVER)

    def on_leader_lost(self, why: str, *, has_left: bool = False) -> bool:
        """Begin to elect another leader, because this one is lost or `has_left`; return False if that is impossible."""
        if self.is_open:
            return True
        if not self._successor.begin_election():
            return False
        self.leadership = Leadership.ELECTING
        self._lost, self._why = self._channel.first, why
        what = "leaves (SIGTERM)" if has_left else f"is lost: {why}"
        self._host.display.print(
            f"phalanx run: the host that leads the job {what}. The others elect another leader; the ranks wait"
        )
        return True

    def process(self, message: Change | ControlMessage) -> bool:
        """Process a message if it concerns the succession, or no host leads now; return whether it was processed."""
        if self._take_over is not None:
            self._take_over.process(message)
        elif self.leadership in (Leadership.ELECTING, Leadership.RESUMED):
            self._early.append(message)
            if isinstance(message, Change) and message.kind == "reachable" and self._successor.cancel_election():
                self.leadership = Leadership.RESUMED
                self._early = without_own_changes(self._early)
                self._host.display.print("phalanx run: the host that leads the job answers again: the ranks continue")
        elif isinstance(message, Change) or message.member != self._channel.first:
            return False
        elif message.kind == "datagram":
            with contextlib.suppress(*MALFORMED):
                self._successor.vote(message.member, message.body)
        elif message.kind == "standbys":
            with contextlib.suppress(*MALFORMED):
                self._successor.note_standbys(message.body)
        elif message.kind == "become standby":
            with contextlib.suppress(PhalanxError, OSError, *MALFORMED):  # another host becomes a standby instead
                self._successor.stand_by(self._channel.endpoint, message.body)
        else:
            return False
        return True

    def receive(self, ready: set[int]) -> Leadership:
        """Follow the election; return which host leads the job."""
        if self.leadership is Leadership.RESUMED:
            self.leadership = Leadership.KNOWN
            self._channel.put_back(self._early)
            self._early = []
        for line in () if self._successor.witness_check is None else self._successor.witness_check.receive():
            self._host.display.print(f"phalanx run: {line}")
        for elected in self._successor.receive_result() if self._successor.fileno() in ready else ():
            self._early += self._channel.receive()
            early = without_own_changes(self._early)
            self._early = []
            self._successor.end_election()
            if elected is None:
                self.leadership = Leadership.NONE
                self.loss = f"{self._why}; {self._successor.describe_lack()}"
            else:
                self._follow_elected(elected, early)
        if self._take_over is not None and self._take_over.is_complete:
            self._lead(self._take_over)
        return self.leadership

    def _follow_elected(self, elected: ElectedLeader, early: Sequence[Change | ControlMessage]) -> None:
        self._follow(elected)
        host = Address.parse(elected.address).host
        self._attempt.numbers.set_master(host, elected.master_port)
        handover = self._successor.handover
        if elected.member != self._channel.member or handover is None:
            self.leadership = Leadership.KNOWN
            self._host.display.print(f"phalanx run: the host at {host} leads the job now, and shows the ranks' output")
            self._channel.put(elected.member, "host state", state=HostState.of(self._attempt).to_json())
            self._channel.put_back(early)
            return
        self.leadership = Leadership.TAKING_OVER
        self._host.display.print(
            f"phalanx run: this host leads the job now, and shows the ranks' output. To join: "
            f"phalanx join {elected.address}"
        )
        self._plan = replace(self._plan, master_addr=host, master_port=elected.master_port)
        state = LeaderState.from_bytes(handover.leader_state)
        self._take_over = TakeOver(state, self._lost, self._why, handover, self._channel)
        for message in early:
            self._take_over.process(message)

    def _lead(self, take_over: TakeOver) -> None:
        self._take_over, self.leadership = None, Leadership.OWN
        job, store = self._membership.job_spec.rendezvous, self._membership.open_store()
        limits = Limits(job.min_nodes, job.max_nodes)
        take_over.complete(self._attempt, self._plan, self._host, limits, job.host_timeout_s, store)
        if self._attempt.report_folder:
            self.report = begin_report(self._attempt.plan, self._host, self._attempt.report_folder)
