"""`FollowedSuccession` is a follower's part in the succession while its ranks run.

first host lost ──► election ──┬─ this host ──► take-over: its attempt gets the link of a leader
                               ├─ another one ──► redirected; it receives the state of this host's ranks
                               └─ nobody ──► the ranks end, as without possible successors
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx._comm.control.address import Address
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent.generation import Limits
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import begin_report
from phalanx._job.agent.plan import JobPlan
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage, without_own_changes
from phalanx._job.hosts.host_state import HostState
from phalanx._job.hosts.leader_state import LeaderState
from phalanx._job.hosts.succession.office import ElectedLeader
from phalanx._job.hosts.succession.successor import Successor
from phalanx._job.hosts.succession.take_over import TakeOver
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt
    from phalanx._job.agent.job_report import JobReport


class FollowedSuccession:
    """`FollowedSuccession` follows the succession during one attempt.

    Arguments:
        limits, host_timeout_s: of the job, for a host that leads it.
        store: the coordinator's address, the key and the relay's path.
        on_redirected: called when another host leads; returns the new `store`.
    """

    def __init__(
        self,
        successor: Successor,
        channel: ControlChannel,
        plan: JobPlan,
        host: HostResources,
        limits: Limits,
        host_timeout_s: float,
        store: tuple[str, str, str],
        on_redirected: Callable[[ElectedLeader], tuple[str, str, str]],
    ) -> None:
        self._successor = successor
        self._channel = channel
        self._plan = plan
        self._host = host
        self._limits = limits
        self._host_timeout_s = host_timeout_s
        self.store = store
        self._on_redirected = on_redirected
        self._lost = channel.first  # the member that led until now
        self._why = ""
        self._early: list[Change | ControlMessage] = []  # messages that arrived during the election
        self._is_resumed = False  # whether the leader answers again, and later messages are put back
        self._take_over: TakeOver | None = None
        self.report: JobReport | None = None  # the job's, if this host leads it now
        self.failed = ""  # why the first host is lost, if no host was elected

    @property
    def fds(self) -> tuple[int, ...]:
        """Return descriptors that are readable when `receive` has something to do."""
        trial = self._successor.trial
        return (self._successor.fileno(), *(() if trial is None else (trial.fileno(),)))

    @property
    def is_electing(self) -> bool:
        """Return whether it is not decided yet who leads."""
        return self._successor.is_electing or self._take_over is not None

    def take(self, message: Change | ControlMessage) -> bool:
        """Take a message, if it is for the succession; return whether it is."""
        if self._take_over is not None:
            self._take_over.hear(message)
        elif self._successor.is_electing or self._is_resumed:
            self._early.append(message)
            if isinstance(message, Change) and message.kind == "reachable" and self._successor.cancel_election():
                self._is_resumed = True
                self._early = without_own_changes(self._early)
                self._host.display.say("phalanx run: the host that leads the job is heard again: the ranks go on")
        elif isinstance(message, Change) or message.member != self._channel.first:
            return False
        elif message.kind == "datagram":
            with contextlib.suppress(*MALFORMED):
                self._successor.hear(message.member, message.body)
        elif message.kind == "standbys":
            with contextlib.suppress(*MALFORMED):
                self._successor.hear_standbys(message.body)
        elif message.kind == "stand by":
            with contextlib.suppress(PhalanxError, OSError, *MALFORMED):  # then another one does
                self._successor.stand_by(self._channel.endpoint, message.body)
        else:
            return False
        return True

    def begin(self, why: str, *, leaves: bool = False) -> bool:
        """Begin to choose another host that leads, because that one is lost or `leaves`.

        False: there is none that could, or no majority.
        """
        if not self._successor.begin_election():
            return False
        self._lost, self._why = self._channel.first, why
        what = "leaves (SIGTERM)" if leaves else f"is lost: {why}"
        self._host.display.say(
            f"phalanx run: the host that leads the job {what}. The others choose another one; the ranks wait"
        )
        return True

    def receive(self, ready: set[int], attempt: Attempt) -> bool:
        """Follow the election; return whether this host leads the job now."""
        if self._is_resumed:
            self._is_resumed = False
            self._channel.give_back(self._early)
            self._early = []
        for line in () if self._successor.trial is None else self._successor.trial.take():
            self._host.display.say(f"phalanx run: {line}")
        for elected in self._successor.take_result() if self._successor.fileno() in ready else ():
            self._early += self._channel.take()
            early = without_own_changes(self._early)
            self._early = []
            self._successor.end_election()
            if elected is None:
                self.failed = f"{self._why}; {self._successor.describe_lack()}"
            else:
                self._follow(elected, attempt, early)
        if self._take_over is None or not self._take_over.is_complete or self._successor.office is None:
            return False
        take_over, self._take_over = self._take_over, None
        take_over.begin(
            attempt, self._plan, self._host, self._limits, self._host_timeout_s, self.store, self._successor.office
        )
        if attempt.report_folder:
            self.report = begin_report(attempt.plan, self._host, attempt.report_folder)
        return True

    def _follow(self, elected: ElectedLeader, attempt: Attempt, early: Sequence[Change | ControlMessage]) -> None:
        self.store = self._on_redirected(elected)
        host = Address.parse(elected.address).host
        attempt.numbers.set_master(host, elected.master_port)
        if elected.member != self._channel.member or self._successor.office is None:
            self._host.display.say(f"phalanx run: the host at {host} leads the job now, and shows what the ranks print")
            self._channel.put(elected.member, "here", state=HostState.of(attempt).to_json())
            self._channel.give_back(early)
            return
        self._host.display.say(
            f"phalanx run: this host leads the job now: what the ranks print is shown here. Hosts that come join it by "
            f"phalanx join {elected.address}"
        )
        self._plan = replace(self._plan, master_addr=host, master_port=elected.master_port)
        state = LeaderState.from_bytes(self._successor.office.leader_state)
        self._take_over = TakeOver(state, self._lost, self._why, self._successor.office.gone, self._channel)
        for message in early:
            self._take_over.hear(message)
