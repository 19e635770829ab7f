"""Join the first host's job: wait for the start, and see this host's ranks through under that host's orders."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import OwnAddress, find_interface
from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.processes import ENDING_SIGNALS, name_signal
from phalanx._comm.control.address import Address
from phalanx._comm.control.wire import MALFORMED
from phalanx._comm.diagnostics.printable import printable, printable_lines
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.environment import Place, describe_ranks
from phalanx._job.agent.generation import Limits
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import LedAttempt
from phalanx._job.agent.orphaned import describe_membership
from phalanx._job.agent.plan import JobPlan
from phalanx._job.coordinator.relay import Relay
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.control_channel import FIRST, Change, ControlChannel, ControlMessage, without_own_changes
from phalanx._job.hosts.first_host import JoinedJob, while_listening
from phalanx._job.hosts.follower import FollowerLink, say_host_lost, tells_first_lost
from phalanx._job.hosts.forward import Forward
from phalanx._job.hosts.gather import Gathering
from phalanx._job.hosts.generation_message import generation_from_json
from phalanx._job.hosts.host_state import HostState
from phalanx._job.hosts.job_spec import name_own_address
from phalanx._job.hosts.lead import lead
from phalanx._job.hosts.leader import LeaderLink
from phalanx._job.hosts.leader_state import FIRST_KEY
from phalanx._job.hosts.node_plan import HostFacts, describe_nnodes
from phalanx._job.hosts.reach import check_own
from phalanx._job.hosts.reach_answers import ReachAnswers
from phalanx._job.hosts.succession.followed_succession import FollowedSuccession
from phalanx._job.hosts.succession.moved_job import JobMovedError, LeaderNotice, find_moved
from phalanx._job.hosts.succession.office import ElectedLeader
from phalanx._job.hosts.succession.successor import Successor
from phalanx.errors import LaunchError, PhalanxError

if TYPE_CHECKING:
    from phalanx._job.agent.job_report import JobReport

_PAUSE_S = 0.1
_LEAVE_TIMEOUT_S = 5.0
_REJOIN_TRY_S = 3.0
_LOOK_S = 2.0
_TOO_LATE = (
    "phalanx run: the job has begun without this host, which waits for its next start: with --max-restarts, after a "
    "failure"
)
_AS_A_SPARE = (
    "phalanx run: the job has all the hosts that it may have; this one waits, to take the place of one that is lost"
)


def follow(
    plan: JobPlan,
    rendezvous: Rendezvous,
    host: HostResources,
    joined: JoinedJob,
    on_moved: Callable[[str], object],
) -> int:
    """See this host's ranks through; returns the exit code, which is the first host's.

    `on_moved` is called with the address of each host that comes to lead the job.

    Raises:
        LaunchError: the first host is lost, or does not take us.
        JobMovedError: another host leads this job, before a rank has started here.
    """
    client = joined.client
    own = rendezvous.local_addr or client.own_host or "127.0.0.1"
    try:
        if joined.key is not None:
            check_own(own)
    except OSError as error:
        client.close()
        raise LaunchError(
            f"phalanx run: {own} is no address of this host that others could reach ({error.strerror}); give one with "
            "--local-addr",
            exit_code=2,
        ) from None
    facts = HostFacts(
        -1, socket.gethostname(), os.getpid(), plan.num_ranks, plan.settings.role, own, rendezvous.node_rank,
        joined.job_spec.settings.run_id,
        "" if rendezvous.max_nodes == 1 else describe_nnodes(rendezvous.min_nodes, rendezvous.max_nodes),
    )  # fmt: skip
    assert isinstance(host.pump.viewer, Forward)
    told = {**facts.to_json(), "reached": client.address.host}

    def join(say: Callable[[str], None]) -> int:
        first = int(client.get(FIRST_KEY)) if client.check([FIRST_KEY]) else FIRST
        client.join(told, watch=(first,))
        if moved := find_moved(client):  # it has been sent on, all that had come until then
            client.leave()
            raise JobMovedError(moved)
        return first

    try:
        first = while_listening(host, threading.Event(), join)
        channel = ControlChannel(client)
        channel.first = first
    except JobMovedError:
        client.close()
        raise
    except PhalanxError as error:
        client.close()
        raise error if isinstance(error, LaunchError) else LaunchError(f"phalanx run: {error}") from None
    host.pump.viewer.connect(channel)
    host.zygote.remember(describe_membership(client))
    followed = _Followed(plan, rendezvous, host, joined, channel, own, told, on_moved)
    try:
        return followed.run()
    finally:
        followed.close()
        if not followed.is_alone:
            channel.leave(_LEAVE_TIMEOUT_S)
        channel.close()
        followed.close_office()


def _stop_before_start(number: int) -> None:
    if number in ENDING_SIGNALS:
        raise LaunchError(f"phalanx run: stopped by {name_signal(number)} before the job began", exit_code=128 + number)


class _Followed:
    """`_Followed` is this host in a job: start after start, until the first host reports the end."""

    def __init__(
        self,
        plan: JobPlan,
        rendezvous: Rendezvous,
        host: HostResources,
        joined: JoinedJob,
        channel: ControlChannel,
        own: str,
        facts: dict[str, Any],
        on_moved: Callable[[str], object],
    ) -> None:
        self._facts = facts  # this host's description for the first host
        self._plan = plan
        self._rendezvous = rendezvous
        self._host = host
        self._joined = joined
        self._channel = channel
        self._own = own
        self._on_moved = on_moved
        self._notice: LeaderNotice | None = None  # once this host leads the job
        self._reach_answers = ReachAnswers(channel, joined.key, own)
        self._relay: Relay | None = None
        self._successor = self._make_successor()
        self._has_begun = False
        self._finished: tuple[FollowerLink, HostState] | None = None  # an attempt whose ranks have ended well here
        self.is_alone = False  # the first host is lost

    def run(self) -> int:
        while True:
            message = self._await_orders()
            if message.kind == "end":
                return self._end(message.body)
            attempt, link = self._begin(message.body)
            with contextlib.closing(attempt):
                attempt.run()
                if isinstance(attempt.link, LeaderLink):
                    return self._lead(attempt, attempt.link, link.report)
            if attempt.ranks.zygote_lost and not attempt.ranks.zygote_given_up:
                why = "the process from which its ranks are forked (the zygote) has ended"
                self._channel.put(self._channel.first, "failed", attempt=int(message.body["attempt"]), why=why)
            if link.ended is not None:
                return self._end(link.ended)
            if link.supervision.leaves:
                return 128 + signal.SIGTERM
            if link.has_finished:
                self._finished = link, HostState.of(attempt)
            if link.supervision.abandoned_by and not self._come_back(link):
                self._raise_lost(link.supervision.abandoned_by)

    def _told(self) -> dict[str, Any]:
        """Return this host's description for the current leader, with the address at which the leader was found."""
        return {**self._facts, "reached": self._joined.client.address.host}

    def _make_successor(self) -> Successor | None:
        """Return this host's part in the succession, for one membership."""
        if self._joined.key is None:  # all agents are on one host
            return None
        return Successor(self._channel, self._joined.key, self._own, self._joined.job_spec.rendezvous.host_timeout_s)

    def _lead(self, attempt: Attempt, link: LeaderLink, report: JobReport | None) -> int:
        """Lead the job on, of which this host has led an attempt to its end; or leave that to another host."""
        successor, key, first = self._successor, self._joined.key, self._joined.job_spec.rendezvous
        assert successor is not None
        assert successor.office is not None
        assert key is not None
        service = successor.office.service
        rendezvous = replace(
            self._rendezvous,
            endpoint=str(service.address),
            leads=True,
            min_nodes=first.min_nodes,
            max_nodes=first.max_nodes,
            join_timeout_s=first.join_timeout_s,
            last_call_s=first.last_call_s,
            host_timeout_s=first.host_timeout_s,
        )
        port = service.address.port if service.address is not None else 0
        own = OwnAddress(self._own, find_interface(self._own))
        gathering = Gathering(attempt.plan, rendezvous, self._host, self._channel, key, [own], port)
        gathering.take_over(link)
        code = lead(attempt.plan, self._host, gathering, service.local, LedAttempt(attempt, report))
        self.is_alone = gathering.has_left
        return code

    def _come_back(self, link: FollowerLink) -> bool:
        """Rejoin an elastic job after this host's ranks were abandoned, if the first host answers in time.

        The others may have continued without this host, or wait for it; the state of its ranks is useless.
        """
        if self._follow_election(link.supervision.abandoned_by):
            return True
        if not link.supervision.is_elastic or link.wait_s <= 0 or self._channel.is_over:
            return False
        self._host.display.say(f"phalanx run: waiting up to {link.wait_s:g} s for the first host, to be taken in again")
        over = threading.Event()
        deadline = Deadline.after(link.wait_s)

        def join(say: Callable[[str], None]) -> bool:
            while not over.is_set() and not deadline.passed:
                is_over = self._channel.is_over
                with contextlib.suppress(PhalanxError):
                    if not is_over:
                        self._channel.join_again(self._told(), _REJOIN_TRY_S, (self._channel.first,))
                        return True
                with contextlib.suppress(PhalanxError):
                    if self._find_elected(over):
                        return True
                if is_over:
                    return False
            return False

        if not while_listening(self._host, over, join, "while the first host was awaited"):
            return False
        self._renew_membership()
        self._host.display.say("phalanx run: the first host is heard again")
        return True

    def _find_elected(self, over: threading.Event) -> bool:
        """Join the host that was elected meanwhile to lead the job, if there is one; return whether this host has.

        Raises:
            PhalanxError: it does not answer.
        """
        successor = self._successor
        if successor is None or not successor.observe_election(_LOOK_S):
            time.sleep(_PAUSE_S)
            return False
        elected = successor.await_result(over)
        successor.end_election()
        if elected is None:
            return False
        self._move(elected)
        self._channel.join_again(self._told(), _REJOIN_TRY_S, (self._channel.first,))
        return True

    def _follow_election(self, why: str) -> bool:
        """Follow the host that is elected to lead the job; return False if none is, or the result is unknown.

        This host votes if its ranks have succeeded. Otherwise it has no vote, and joins as a new host: it was waiting
        to be accepted, or its ranks were starting.
        """
        successor = self._successor
        votes = successor is not None and self._finished is not None and successor.begin_election(stands=False)
        if successor is None or not (votes or successor.observe_election()):
            return False
        say = self._host.display.say
        say(f"phalanx run: this host waits while the others choose another one that leads the job: {why}")
        over, what = threading.Event(), "while another host was chosen that leads the job"
        elected = while_listening(self._host, over, lambda say: successor.await_result(over), what)
        successor.end_election()
        if elected is None:
            return False
        if votes and self._finished is not None:
            link, state = self._finished
            self._move(elected)
            self._channel.give_back(without_own_changes(self._channel.take()))
            self._channel.put(elected.member, "here", state=state.to_json())
            link.send_records()
        else:
            self._move(elected)
            try:
                self._channel.join_again(self._told(), _REJOIN_TRY_S, (self._channel.first,))
            except PhalanxError:
                return False
            self._renew_membership()
        say(f"phalanx run: the host at {Address.parse(elected.address).host} leads the job now; this host waits there")
        return True

    def _renew_membership(self) -> None:
        """Update all objects that hold this host's member to the new one."""
        self._host.zygote.remember(describe_membership(self._joined.client))
        if self._successor is not None:
            self._successor.close()
            self._successor = self._make_successor()

    def _open_relay(self) -> str:
        """Return the path at which this host's ranks reach the job's store, over one connection for all of them."""
        client = self._joined.client
        if self._relay is None and not client.address.path:
            self._relay = Relay(client.endpoint, self._joined.key, lambda: client.member)
        return "" if self._relay is None else self._relay.path

    def close(self) -> None:
        """Release what this host opened for the others and for its ranks."""
        self._reach_answers.close()
        if self._notice is not None:
            self._notice.close()
        if self._relay is not None:
            self._relay.close()
        if self._successor is not None:
            self._successor.close()

    def close_office(self) -> None:
        """Close the job's coordinator, if this host was elected to lead the job."""
        if self._successor is not None:
            self._successor.close_office()

    def _raise_lost(self, why: str) -> NoReturn:
        self.is_alone = True
        assert isinstance(self._host.pump.viewer, Forward)
        self._host.pump.viewer.show_here(self._host.display)
        if not self._has_begun:
            raise LaunchError(f"phalanx run: the first host is lost before the job began: {why}")
        raise LaunchError(
            f"phalanx run: the first host is lost: {why}. The ranks of this host have ended. If that host is still "
            "there, "
            "its output says more."
        )

    def _end(self, body: dict[str, Any]) -> int:
        if body.get("why"):
            raise LaunchError(printable_lines(str(body["why"])), exit_code=int(body["code"]))
        return int(body["code"])

    def _await_orders(self) -> ControlMessage:
        """Return the next start, or the end; meanwhile, test whether this host reaches the others."""
        orders: list[ControlMessage] = []

        def hear(ready: set[int]) -> None:
            messages = self._channel.take() if self._channel.fileno() in ready or self._channel.has_more else []
            first = self._channel.first
            for number, message in enumerate(messages):
                order = self._read(message)
                if first != self._channel.first:
                    return  # the lost host has printed the rest
                if order is not None:  # messages after it are for the ranks that it starts
                    self._channel.give_back(messages[number + 1 :])
                    orders.append(order)
                    return

        channel = self._channel
        loop = EventLoop(
            self._host.watch_signals(_stop_before_start),
            Source(hear, lambda: (channel.fileno(),), due=lambda: time.monotonic() if channel.has_more else None),
            self._host.watch_display(),
        )
        while not orders:
            loop.turn()
        return orders[0]

    def _read(self, message: ControlMessage | Change) -> ControlMessage | None:
        if isinstance(message, Change):
            if tells_first_lost(message, self._channel.first) and not self._follow_election(message.why):
                self._raise_lost(message.why)
            return None
        if message.member != self._channel.first:
            return None
        if message.kind == "hands over" and not self._follow_election("it leaves (SIGTERM)"):
            self._raise_lost("it has left (SIGTERM)")
        if message.kind == "standbys" and self._successor is not None:
            with contextlib.suppress(*MALFORMED):
                self._successor.hear_standbys(message.body)
        if message.kind == "datagram" and self._successor is not None:
            with contextlib.suppress(*MALFORMED):
                self._successor.hear(message.member, message.body)
        if message.kind == "late":
            self._host.display.say(_AS_A_SPARE if message.body.get("spare") else _TOO_LATE)
        if message.kind == "host lost":
            say_host_lost(message, self._host.display)
        if message.kind == "moved":
            raise JobMovedError(printable(str(message.body["address"])))
        self._reach_answers.hear(message)
        return message if message.kind in ("start", "end") else None

    def _begin(self, body: dict[str, Any]) -> tuple[Attempt, FollowerLink]:
        self._has_begun, self._finished = True, None
        place = Place(**body["place"])
        address, port = body["master"]
        known = {} if self._joined.key is None else name_own_address(self._own, find_interface(self._own))
        plan = replace(
            self._plan,
            run_id=str(body["run_id"]),
            run=str(body["run"]),
            master_addr=str(address),
            master_port=int(port),
            launcher_variables={**self._plan.launcher_variables, **known},
        )
        self._host.display.say(
            f"phalanx run: host {place.node + 1} of {place.num_nodes} of the job at "
            f"{printable(str(body['first_host']))}: "
            f"{describe_ranks(place)} of {place.world_size}. What they print is shown there."
        )
        store = (str(self._joined.client.address), str(self._joined.key or ""), self._open_relay())
        first = None if body.get("begun") is None else generation_from_json(body["begun"])
        number = int(body["attempt"])
        succession = None
        if self._successor is not None:
            job = self._joined.job_spec.rendezvous
            limits = Limits(job.min_nodes, job.max_nodes)
            succession = FollowedSuccession(
                self._successor, self._channel, plan, self._host, limits, job.host_timeout_s, store, self._move
            )
        link = FollowerLink(plan, self._host, number, place, self._channel, store, first, succession)
        return Attempt(plan, self._host, number, link), link

    def _move(self, elected: ElectedLeader) -> tuple[str, str, str]:
        """Move the ranks of this host to another host's coordinator; return the address of its store."""
        client = self._joined.client
        self._on_moved(elected.address)
        if elected.member == self._channel.member and self._joined.key is not None:
            self._notice = LeaderNotice(self._joined.job_spec.endpoints, self._joined.key, elected.address)
        if self._relay is not None:
            self._relay.redirect(client.endpoint, elected.epoch)
        self._host.zygote.remember(describe_membership(client))
        return str(client.address), str(self._joined.key or ""), self._open_relay()
