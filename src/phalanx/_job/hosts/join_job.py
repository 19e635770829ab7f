"""Join a job that another host leads: wait for the order to start, and run this host's ranks as the leader orders."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import find_interface
from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.diagnostics.printable import printable, printable_lines
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic_actions import BeginGeneration
from phalanx._job.agent.environment import Place, describe_ranks
from phalanx._job.agent.host_resources import HostResources, raise_if_ending
from phalanx._job.agent.plan import JobPlan
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage
from phalanx._job.hosts.first_host import JoinedJob, run_interruptibly
from phalanx._job.hosts.follower import FollowerLink, is_leader_loss, show_host_lost
from phalanx._job.hosts.job_membership import JobMembership
from phalanx._job.hosts.job_spec import own_address_variables
from phalanx._job.hosts.line_forwarder import LineForwarder
from phalanx._job.hosts.node_plan import HostFacts, describe_nnodes
from phalanx._job.hosts.reach import ReachAnswers, check_own
from phalanx._job.hosts.succession.host_succession import HostSuccession
from phalanx._job.hosts.succession.moved_job import JobMovedError, join_as_follower
from phalanx.errors import LaunchError, PhalanxError

_LEAVE_TIMEOUT_S = 5.0
_TOO_LATE = (
    "phalanx run: the job has begun without this host. This host waits for the job's next start (with --max-restarts, "
    "after a failure)"
)
_AS_A_SPARE = (
    "phalanx run: the job already has its maximum number of hosts; this host waits, to replace one that is lost"
)


def follow(
    plan: JobPlan,
    rendezvous: Rendezvous,
    host: HostResources,
    joined: JoinedJob,
    on_moved: Callable[[str], object],
) -> int:
    """Run this host's ranks in the job of `joined`; return the job's exit code.

    `on_moved` is called with the address of each host that becomes the leader.

    Raises:
        LaunchError: the leader is lost, or has rejected this host; or other hosts cannot reach this host's address.
        JobMovedError: another host leads this job, and no rank has started here.
    """
    client = joined.client
    own = rendezvous.local_addr or client.own_host or "127.0.0.1"
    try:
        if joined.key is not None:
            check_own(own)
    except OSError as error:
        client.close()
        raise LaunchError(
            f"phalanx run: other hosts cannot reach this host at {own} ({error.strerror}); give another address: "
            "--local-addr",
            exit_code=2,
        ) from None
    facts = HostFacts(
        -1, socket.gethostname(), os.getpid(), plan.num_ranks, plan.settings.role, own, rendezvous.node_rank,
        joined.job_spec.settings.run_id,
        "" if rendezvous.max_nodes == 1 else describe_nnodes(rendezvous.min_nodes, rendezvous.max_nodes),
    )  # fmt: skip
    assert isinstance(host.pump.viewer, LineForwarder)
    fields = {**facts.to_json(), "reached": client.address.host}
    try:
        first = run_interruptibly(host, threading.Event(), lambda log: join_as_follower(client, fields))
        channel = ControlChannel(client)
        channel.first = first
    except JobMovedError:
        client.close()
        raise
    except PhalanxError as error:
        client.close()
        raise error if isinstance(error, LaunchError) else LaunchError(f"phalanx run: {error}") from None
    host.pump.viewer.connect(channel)
    membership = JobMembership(host, joined, channel, fields, own)
    succession = HostSuccession(membership, rendezvous, host, on_moved)
    job = FollowedJob(plan, host, membership, succession)
    try:
        return job.run()
    finally:
        job.close()
        succession.close()
        membership.close()
        if not (job.is_alone or succession.has_left):
            channel.leave(_LEAVE_TIMEOUT_S)
        channel.close()
        succession.close_coordinator()


class FollowedJob:
    """A `FollowedJob` is a job that another host leads; `run` runs its attempts until the leader ends the job."""

    def __init__(
        self,
        plan: JobPlan,
        host: HostResources,
        membership: JobMembership,
        succession: HostSuccession,
    ) -> None:
        self._plan = plan
        self._host = host
        self._membership = membership
        self._channel = membership.channel
        self._succession = succession
        self._reach_answers = ReachAnswers(membership.channel, membership.key, membership.address)
        self._has_begun = False
        self._number = 0  # the number of the newest attempt
        self._was_signalled = False  # whether a signal was reported while this host waited for orders
        self.is_alone = False  # whether the leader is lost, and no other host leads

    def run(self) -> int:
        while True:
            message = self._await_orders()
            if message.kind == "end":
                return self._end(message.body)
            attempt, link = self._begin(message.body)
            with contextlib.closing(attempt):
                try:
                    attempt.run()
                except (PhalanxError, OSError) as error:  # a rank cannot be started
                    self._report("failed", why=str(error).removeprefix("phalanx run: "))
                    raise
                if attempt.link is not link:  # this host leads the job now
                    return self._succession.lead(attempt)
            if attempt.ranks.zygote_lost and not attempt.ranks.zygote_killed:
                self._report("failed", why="the zygote, which forks its ranks, has exited")
            if link.ended is not None:
                return self._end(link.ended)
            if link.supervision.leaves:
                return 128 + signal.SIGTERM
            self._succession.end_attempt(attempt, link)
            if link.supervision.abandoned_by and not self._rejoin(link):
                self._raise_lost(link.supervision.abandoned_by)

    def _rejoin(self, link: FollowerLink) -> bool:
        """Rejoin an elastic job after this host's ranks were stopped, if the job's leader answers in time.

        The other hosts have continued without this host, or wait for it; its ranks start anew and receive the state.
        """
        if self._succession.await_leader(link.supervision.abandoned_by):
            return True
        if not link.supervision.is_elastic or link.wait_s <= 0 or self._channel.is_over:
            return False
        self._host.display.print(f"phalanx run: waiting up to {link.wait_s:g} s for the first host, to rejoin the job")
        over = threading.Event()
        deadline = Deadline.after(link.wait_s)

        def join(log: Callable[[str], None]) -> bool:
            while not over.is_set() and not deadline.passed:
                is_over = self._channel.is_over
                with contextlib.suppress(PhalanxError):
                    if not is_over:
                        self._membership.rejoin()
                        return True
                with contextlib.suppress(PhalanxError):
                    if self._succession.rejoin(over):
                        return True
                if is_over:
                    return False
            return False

        if not run_interruptibly(self._host, over, join, "while this host waited for the first host"):
            return False
        self._succession.renew()
        self._host.display.print("phalanx run: the first host answers again")
        return True

    def _report(self, kind: str, **body: Any) -> None:
        """Send the leader a message about the newest attempt."""
        self._channel.put(self._channel.first, kind, attempt=self._number, **body)

    def close(self) -> None:
        """Close the port at which other hosts have tried to reach this one."""
        self._reach_answers.close()

    def _raise_lost(self, why: str) -> NoReturn:
        self.is_alone = True
        assert isinstance(self._host.pump.viewer, LineForwarder)
        self._host.pump.viewer.show_here(self._host.display)
        if not self._has_begun:
            raise LaunchError(f"phalanx run: the first host was lost before the job began: {why}")
        raise LaunchError(
            f"phalanx run: the first host is lost: {why}. The ranks of this host have ended. If the first host "
            "still runs, read its output."
        )

    def _end(self, body: dict[str, Any]) -> int:
        if body.get("why"):
            raise LaunchError(printable_lines(str(body["why"])), exit_code=int(body["code"]))
        return int(body["code"])

    def _await_orders(self) -> ControlMessage:
        """Wait for the leader's order to start or to end; meanwhile, take part in the reachability test."""
        orders: list[ControlMessage] = []

        def receive(ready: set[int]) -> None:
            messages = self._channel.receive() if self._channel.fileno() in ready or self._channel.has_more else []
            first = self._channel.first
            for number, message in enumerate(messages):
                order = self._read(message)
                if first != self._channel.first:
                    return  # drop the rest: the lost leader sent these messages, and has shown their contents itself
                if order is not None:  # later messages are for the ranks that this order starts
                    self._channel.put_back(messages[number + 1 :])
                    orders.append(order)
                    return

        channel = self._channel
        loop = EventLoop(
            self._host.watch_signals(self._on_signal),
            Source(receive, lambda: (channel.fileno(),), due=lambda: time.monotonic() if channel.has_more else None),
            self._host.watch_display(),
        )
        while not orders:
            loop.turn()
        return orders[0]

    def _on_signal(self, number: int) -> None:
        """Report the first signal to the leader, which decides for all hosts.

        Exit on a second signal, or if the job has not begun. No rank runs on this host while it waits for orders.
        """
        if number in ENDING_SIGNALS and self._has_begun and not self._was_signalled:
            self._was_signalled = True
            self._report("signal", signum=number)
        else:
            raise_if_ending(number, "before the job ended" if self._has_begun else "before the job began")

    def _read(self, message: ControlMessage | Change) -> ControlMessage | None:
        if isinstance(message, Change):
            if is_leader_loss(message, self._channel.first) and not self._succession.await_leader(message.why):
                self._raise_lost(message.why)
            return None
        if message.member != self._channel.first:
            return None
        if message.kind == "transfer leadership" and not self._succession.await_leader("it leaves (SIGTERM)"):
            self._raise_lost("it has left (SIGTERM)")
        self._succession.process(message)
        if message.kind == "late":
            self._host.display.print(_AS_A_SPARE if message.body.get("spare") else _TOO_LATE)
        if message.kind == "host lost":
            show_host_lost(message, self._host.display)
        self._reach_answers.process(message)
        return message if message.kind in ("start", "end") else None

    def _begin(self, body: dict[str, Any]) -> tuple[Attempt, FollowerLink]:
        self._has_begun = True
        place = Place(**body["place"])
        address, port = body["master"]
        own = self._membership.address
        known = {} if self._membership.key is None else own_address_variables(own, find_interface(own))
        plan = replace(
            self._plan,
            run_id=str(body["run_id"]),
            run=str(body["run"]),
            master_addr=str(address),
            master_port=int(port),
            launcher_variables={**self._plan.launcher_variables, **known},
        )
        self._host.display.print(
            f"phalanx run: host {place.node + 1} of {place.num_nodes} of the job at "
            f"{printable(str(body['first_host']))}: "
            f"{describe_ranks(place)} of {place.world_size}. Their output is shown there."
        )
        first = None if body.get("begun") is None else BeginGeneration.from_json(body["begun"])
        self._number = number = int(body["attempt"])
        succession = self._succession.begin_attempt(plan)
        link = FollowerLink(plan, self._host, number, place, self._membership, first, succession)
        return Attempt(plan, self._host, number, link), link
