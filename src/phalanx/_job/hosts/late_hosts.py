"""`LateHosts` follows hosts that come, and go again, while the ranks of others run."""

from __future__ import annotations

from phalanx._job.agent.generation import ArrivedHost
from phalanx._job.hosts.control_channel import Change
from phalanx._job.hosts.node_plan import HostFacts, describe_unfit, find_conflict
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.succession.moved_job import describe_second_job
from phalanx._job.output.display import Display


class LateHosts:
    """The hosts that wait; who they are stands in `PeerHosts.late`."""

    def __init__(self, peers: PeerHosts, display: Display) -> None:
        self._peers = peers
        self._display = display

    def on_joined(self, change: Change) -> ArrivedHost | None:
        """Return what a host that has come brings; None if it cannot be in this job, which is said."""
        problem = describe_unfit(change.facts) or describe_second_job(change.facts)
        facts = None if problem else HostFacts.from_json(change.member, change.facts)
        if facts is None:
            if problem:
                self._display.say(f"phalanx run: {problem}")
            return None
        if conflict := find_conflict([self._peers.own.facts, facts], self._peers.limits.max_hosts):
            self._peers.send_away(change.member, conflict)
            self._display.say(f"phalanx run: {conflict}. The job goes on without that host")
            return None
        self._peers.late[change.member] = change
        return ArrivedHost(change.member, facts.num_ranks, facts.known_as, facts.role)

    def on_gone(self, change: Change) -> None:
        """Forget a host that has left or is lost, if it waited: it is not there for the next start."""
        waited = self._peers.late.pop(change.member, None)
        if waited is not None and change.kind == "lost":
            facts = HostFacts.from_json(change.member, waited.facts)
            where = "a host" if facts is None else f"{facts.name} ({facts.address})"
            self._display.say(f"phalanx run: {where}, which waited to be taken in, is lost: {change.why}")

    def tell(self, member: int, *, is_spare: bool) -> None:
        """Tell a host, if it waits, what it waits for: the place of a lost one, or the next start."""
        if member not in self._peers.late:
            return
        if is_spare:
            self._peers.spares.add(member)
        self._peers.channel.put(member, "late", spare=is_spare)

    def tell_again(self, *, is_spare: bool) -> None:
        """Tell the hosts that came before the job was known to be elastic what they wait for now."""
        for member in set(self._peers.late) - self._peers.spares:
            self.tell(member, is_spare=is_spare)
