"""Lead a job on several hosts: before each attempt, wait for the hosts and test that they reach each other."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import wait_readable
from phalanx._base.host_addresses import OwnAddress, find_interface
from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MALFORMED
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.environment import describe_ranks
from phalanx._job.agent.generation import Limits
from phalanx._job.agent.host_resources import HostResources, raise_if_ending
from phalanx._job.agent.job import LOST_OUTPUT_EXIT_CODE, LedAttempt, run_attempts
from phalanx._job.agent.plan import JobPlan, find_free_port
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage
from phalanx._job.hosts.job_spec import own_address_variables
from phalanx._job.hosts.leader import LeaderLink
from phalanx._job.hosts.node_plan import HostFacts, Node, describe_nnodes, describe_unfit, find_conflict, plan_nodes
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.reach import TRY_S, ReachTarget, choose_targets, describe, try_all
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.hosts.succession.leader_notice import follow_notice
from phalanx._job.hosts.succession.moved_job import JobMovedError
from phalanx.errors import LaunchError

_NOTIFY_AFTER_S = 3.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class JoinedHost:
    """A `JoinedHost` is a host that has joined. `reached` is the address at which it reached this host."""

    facts: HostFacts
    reached: str


class Gathering:
    """`Gathering` waits for the job's hosts before each attempt, and runs the attempts."""

    def __init__(
        self,
        plan: JobPlan,
        rendezvous: Rendezvous,
        host: HostResources,
        channel: ControlChannel,
        key: Key,
        advertised: Sequence[OwnAddress],
        port: int,
        guard: LeadGuard,
    ) -> None:
        self.guard = guard
        self._plan = plan
        self._rendezvous = rendezvous
        self._host = host
        self._channel = channel
        self._key = key
        self._advertised = advertised
        self._port = port
        self._joined_hosts: dict[int, JoinedHost] = {}  # in the order of joining
        self._trial = 0
        self._ports: dict[int, tuple[int, str]] = {}  # by member: its port in this trial, or 0 and the reason
        self._results: dict[int, dict[int, str]] = {}  # member -> node -> result in this trial
        self._tried: set[int] = set()  # the members of this trial
        self._gone: set[int] = set()  # the members that have left during this trial
        self._peers: PeerHosts | None = None
        self._link: LeaderLink | None = None  # the link of the newest attempt
        self._loop = EventLoop(
            host.watch_signals(raise_if_ending),
            Source(self._check_zygote, lambda: (host.zygote.control.fileno(),)),
            Source(self._receive_notices, lambda: (channel.notices.fileno(),)),
            Source(self._receive_messages, lambda: (channel.fileno(),)),
            host.watch_display(),
        )

    def continue_attempt(self, link: LeaderLink) -> None:
        """Continue an attempt after this host has become its leader; all hosts of the attempt have already joined."""
        self._link, self._peers = link, link.peers
        for member, node in link.peers.others.items():
            self._joined_hosts[member] = JoinedHost(node.facts, self._advertised[0].address)

    def lead(self, local_store: str, led: LedAttempt | None = None) -> int:
        """Run the job's attempts, beginning with `led` if this host has already run that one; return the exit code.

        The other hosts receive the result. The guard is closed on return.

        Raises:
            LaunchError: hosts cannot reach each other, or too few join in time.
            JobMovedError: another host already leads this job. All hosts that had joined were redirected.
        """
        try:
            code = run_attempts(self._plan, self._host, lambda count: self._begin(count, local_store), led)
        except LaunchError as error:
            self._end(error.exit_code, str(error))
            raise
        except JobMovedError:
            raise
        except BaseException:
            self._end(1, "the host that leads the job has failed")
            raise
        finally:
            self.guard.close()
        if self.has_left:
            return code
        self._end(code, "")
        self.guard.forget()
        return code or (0 if self._host.display.lost is None else LOST_OUTPUT_EXIT_CODE)

    def _begin(self, restart_count: int, local_store: str) -> Attempt:
        """Wait for the hosts of the next attempt, order them to start their ranks, and return the attempt.

        Raises:
            LaunchError: too few hosts joined in time; their options conflict (`find_conflict`); they cannot reach each
                other; or a signal arrived.
            JobMovedError: this job already runs, and another host leads it.
        """
        if self._peers is not None:
            for message in (*self._peers.accepted.values(), *self._peers.late.values()):
                self._read(message)
            for member in self._peers.lost:
                self._joined_hosts.pop(member, None)
        while True:
            nodes = self._gather()
            if self._rendezvous.is_local or self._try_reach(nodes):
                break
        self._make_rest_join_late(nodes)
        own = next(node for node in nodes if node.facts.member == self._channel.member)
        if restart_count:
            self.guard.clear_record()
        self._peers = peers = PeerHosts(
            self._channel,
            nodes,
            own,
            self._rendezvous.host_timeout_s,
            Limits(self._rendezvous.min_nodes, self._rendezvous.max_nodes),
        )
        address = own.facts.address
        known = {} if self._rendezvous.is_local else own_address_variables(address, find_interface(address))
        plan = replace(
            self._plan,
            master_addr=address,
            master_port=find_free_port(),
            launcher_variables={**self._plan.launcher_variables, **known},
        )
        self._host.display.print(
            f"phalanx run: {len(nodes)} hosts: "
            + "; ".join(f"{node.where} {describe_ranks(node.place)}" for node in nodes)
        )
        self._link = link = LeaderLink(
            plan, self._host, restart_count, peers, (local_store, str(self._key)), self.guard
        )
        attempt = Attempt(plan, self._host, restart_count, link)
        for node in peers.others.values():
            peers.send_start(node, plan, restart_count)
        return attempt

    def _make_rest_join_late(self, nodes: Sequence[Node]) -> None:
        """Make the hosts that are not in `nodes` wait, as if they had joined during the attempt."""
        rest = self._joined_hosts.keys() - {node.facts.member for node in nodes}
        for member in sorted(rest):
            joined = self._joined_hosts.pop(member)
            facts = {**joined.facts.to_json(), "reached": joined.reached}
            self._channel.put_back([Change("joined", member, facts, "")])

    @property
    def has_left(self) -> bool:
        """Return whether this host has left the job, which another host now leads."""
        return self._link is not None and self._link.has_left

    def _end(self, code: int, why: str) -> None:
        """Notify all hosts that the job has ended, and wait up to 5 s until they have left."""
        waiting = set(self._joined_hosts)
        if self._peers is not None:
            spares = self._peers.late.keys() & self._peers.spares
            for member in self._peers.late.keys() - spares:
                self._refuse(member, "the job has ended; it had begun without this host")
            waiting = (waiting | set(self._peers.accepted) | spares) - set(self._peers.lost)
        self._channel.put(-1, "end", code=code, why=why)
        deadline = Deadline.after(_END_TIMEOUT_S)
        while waiting and not deadline.passed:
            wait_readable([self._channel], 0.1)
            for message in self._channel.receive():
                if not isinstance(message, Change):
                    continue
                if message.kind in ("left", "lost", "unreachable", "expelled"):
                    waiting.discard(message.member)
                elif message.kind == "joined":  # too late
                    self._channel.put(message.member, "end", code=code or 1, why=why or "phalanx run: that job is over")
        self._channel.flush(1.0)

    @property
    def _own(self) -> HostFacts:
        # Hosts use the address at which they reached this host; if these differ, that of the first one to join is used.
        reached = (joined_host.reached for joined_host in self._joined_hosts.values())
        address = next(reached, self._advertised[0].address)
        settings = self._plan.settings
        return HostFacts(
            self._channel.member, socket.gethostname(), os.getpid(), self._plan.num_ranks, settings.role, address,
            self._rendezvous.node_rank, self._plan.run_id,
            describe_nnodes(self._rendezvous.min_nodes, self._rendezvous.max_nodes),
        )  # fmt: skip

    def _gather(self) -> list[Node]:
        rendezvous = self._rendezvous
        end = time.monotonic() + rendezvous.join_timeout_s
        last_call: float | None = None
        invite_at = time.monotonic() + (0.0 if self._is_inviting else _NOTIFY_AFTER_S)
        while True:
            now = time.monotonic()
            count = 1 + len(self._joined_hosts)
            if count >= rendezvous.max_nodes:
                break
            if count >= rendezvous.min_nodes:
                last_call = last_call or min(now + rendezvous.last_call_s, end)
                if now >= last_call:
                    break
            elif now >= end:
                raise LaunchError(self._explain_missing(count))
            else:
                last_call = None
            if invite_at <= now:
                invite_at = float("inf")
                self._host.display.print(self._invite(count))
            self._loop.turn(min(at for at in (end, invite_at, last_call) if at is not None) - now)
        joined_hosts = list(self._joined_hosts.values())[: rendezvous.max_nodes - 1]
        hosts = [self._own, *(joined_host.facts for joined_host in joined_hosts)]
        self._check_conflict(hosts)
        return plan_nodes(hosts)

    def _check_conflict(self, hosts: Sequence[HostFacts]) -> None:
        conflict = find_conflict(hosts, self._rendezvous.max_nodes)
        if conflict:
            raise LaunchError(f"phalanx run: {conflict}.", exit_code=2)

    @property
    def _is_inviting(self) -> bool:
        """Return whether users learn the address to join only from this host's output."""
        return not self._rendezvous.endpoint or self._rendezvous.endpoint.startswith(":")

    def _invite(self, count: int) -> str:
        missing = self._rendezvous.min_nodes - count
        more = f"{missing} more host{'s' * (missing != 1)}" if missing > 0 else "more hosts"
        if self._rendezvous.is_local:  # without a port, and so without an address to type
            return f"phalanx run: waiting for {more}, which the same scheduler starts on this host"
        first, *others = [join_endpoint(own.address, self._port) for own in self._advertised]
        if not self._is_inviting:
            return f"phalanx run: waiting for {more} at {first} (key {self._key.fingerprint})"
        text = f"phalanx run: waiting for {more}. There, type:\n\n    phalanx join {first}\n"
        if others:
            text += f"\nor, if that address cannot be reached: {', '.join(others)}"
        return text

    def _explain_missing(self, count: int) -> str:
        here = ", ".join(["this one", *(f"{g.facts.name} ({g.facts.address})" for g in self._joined_hosts.values())])
        places = ", ".join(join_endpoint(own.address, self._port) for own in self._advertised)
        if self._rendezvous.is_local:
            places = "a socket of this host"
        return (
            f"phalanx run: {count} of {self._rendezvous.min_nodes} hosts joined within "
            f"{self._rendezvous.join_timeout_s:g} s: {here}. This host waited for the others at {places}. "
            "Read their output: it names the address that each of them tried, and the answer."
        )

    def _check_zygote(self, ready: set[int]) -> None:
        control = self._host.zygote.control
        if control.fileno() not in ready:
            return
        control.send_some()
        control.receive_available()
        if control.gone:
            raise LaunchError(
                "phalanx run: the zygote, which forks the ranks, exited while importing torch. If nobody killed it, "
                "the host may be out of memory; or try --no-preload."
            )

    def _receive_notices(self, ready: set[int]) -> None:
        for line in self._channel.notices.receive_all() if self._channel.notices.fileno() in ready else ():
            self._host.display.print(f"phalanx run: {line}")

    def _receive_messages(self, ready: set[int]) -> None:
        for message in self._channel.receive() if self._channel.fileno() in ready else ():
            self._read(message)

    def _read(self, message: ControlMessage | Change) -> None:
        if isinstance(message, Change):
            self._process_change(message)
        elif message.member in self._joined_hosts or message.member == self._channel.member:
            with contextlib.suppress(*MALFORMED):
                self._process(message)

    def _process_change(self, change: Change) -> None:
        if change.kind == "joined":
            if unfit := describe_unfit(change.facts):
                self._host.display.print(f"phalanx run: {unfit}")
            has_begun = self._peers is not None
            follow_notice(change.facts, self._plan.settings, self._host, self._channel, self._key, has_begun=has_begun)
            facts = HostFacts.from_json(change.member, change.facts)
            if facts is not None and "reached" in change.facts:
                self._joined_hosts[change.member] = JoinedHost(facts, printable(str(change.facts["reached"])))
                if self._peers is None:  # check now: the missing hosts may never join
                    self._check_conflict([self._own, facts])
                elif conflict := find_conflict([self._own, facts], self._rendezvous.max_nodes):
                    del self._joined_hosts[change.member]  # a late host does not end a job that has begun
                    self._peers.reject(change.member, conflict)
                    self._host.display.print(f"phalanx run: {conflict}. The job continues without that host")
        elif change.kind in ("left", "lost"):
            gone = self._joined_hosts.pop(change.member, None)
            self._gone.add(change.member)
            if change.kind == "lost":
                self._channel.expel(change.member)  # no vote is needed yet; this notifies the member
            if gone is not None and change.kind == "lost":
                who = f"{gone.facts.name} ({gone.facts.address})"
                self._host.display.print(f"phalanx run: {who} was lost before the job began: {change.why}")
        elif change.kind in ("unreachable", "expelled"):
            raise LaunchError(f"phalanx run: the coordinator on this host has failed: {change.why}")

    def _process(self, message: ControlMessage) -> None:
        if message.body.get("trial") != self._trial:
            return
        if message.kind == "answering":
            self._ports[message.member] = int(message.body["port"]), printable(str(message.body["problem"]))
        elif message.kind == "reached":
            results = {int(node): printable(str(answer)) for node, answer in message.body["results"]}
            self._results[message.member] = results

    def _refuse(self, member: int, why: str) -> None:
        self._joined_hosts.pop(member, None)
        self._channel.put(member, "end", code=1, why=f"phalanx run: {why}")

    def _try_reach(self, nodes: Sequence[Node]) -> bool:
        """Make each host test whether it reaches the other hosts (a subset of them if there are more than 32).

        Return False if a host has left.

        Raises:
            LaunchError: a host cannot reach another one, or did not answer.
        """
        joined_hosts = [node for node in nodes if node.facts.member != self._channel.member]
        self._trial += 1
        self._ports, self._results = {}, {}
        self._tried, self._gone = {node.facts.member for node in joined_hosts}, set()
        self._channel.put_many([node.facts.member for node in joined_hosts], "answer", trial=self._trial)
        if not self._await_all(lambda: len(self._ports) == len(joined_hosts)):
            return False
        targets = []
        lines = []
        for node in joined_hosts:
            port, problem = self._ports.get(node.facts.member, (0, "it did not answer"))
            targets.append(ReachTarget(node.place.node, node.label, node.facts.address, port))
            if not port:
                lines.append(f"  {node.label} cannot be tested at {node.facts.address}: {problem}")
        if not lines:
            results = self._try_targets(nodes, joined_hosts, targets)
            if results is None:
                return False
            lines = describe([node.label for node in nodes], results, targets)
        if lines:
            raise LaunchError(
                "phalanx run: the hosts cannot all reach each other. Each host tried the addresses at which the others "
                "reach the first host:\n" + "\n".join(lines) + "\nOpen these ports (firewall), or use other addresses: "
                "--local-addr on the hosts concerned."
            )
        return True

    def _try_targets(
        self, nodes: Sequence[Node], joined_hosts: Sequence[Node], targets: Sequence[ReachTarget]
    ) -> dict[int, dict[int, str]] | None:
        """Return each host's result for each target; None if a host has left."""
        expected, trial = set(), self._trial
        by_node = {target.node: target for target in targets}
        for node in nodes:
            theirs = [by_node[number] for number in sorted(choose_targets(node.place.node, list(by_node)))]
            if not theirs:
                continue  # the only other host is the first host, which this one has reached to join
            expected.add(node.facts.member)
            if node.facts.member == self._channel.member:
                try_all(
                    theirs,
                    self._key.reach_secret(),
                    lambda results: self._channel.put(
                        self._channel.member, "reached", trial=trial, results=list(results.items())
                    ),
                )
            else:
                self._channel.put(
                    node.facts.member,
                    "reach",
                    trial=trial,
                    targets=[[each.node, each.label, each.address, each.port] for each in theirs],
                )
        if not self._await_all(lambda: len(self._results) == len(expected)):
            return None
        silent = {target.node: "did not answer" for target in targets}
        return {
            node.place.node: self._results.get(node.facts.member, silent)
            for node in nodes
            if node.facts.member in expected
        }

    def _await_all(self, done: Callable[[], bool]) -> bool:
        """Wait until `done` returns True or time is up; return False if a host has left."""
        deadline = Deadline.after(2 * TRY_S)
        while not done() and not deadline.passed:
            self._loop.turn(deadline.left_s)
            if self._tried & self._gone:
                self._channel.put(-1, "tried")
                return False
        return True
