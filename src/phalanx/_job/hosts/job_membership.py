"""`JobMembership` is a follower's membership in its job, with the relay by which its ranks reach the job's store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.orphaned import describe_membership
from phalanx._job.coordinator.relay import Relay
from phalanx._job.hosts.control_channel import ControlChannel
from phalanx._job.hosts.first_host import JoinedJob

_REJOIN_S = 3.0


class JobMembership:
    """A `JobMembership` owns the relay by which this host's ranks share one connection to the coordinator.

    Arguments:
        facts: this host's description for the leader.
        address: where other hosts reach this one.
    """

    def __init__(
        self, host: HostResources, joined: JoinedJob, channel: ControlChannel, facts: Mapping[str, Any], address: str
    ) -> None:
        self._host = host
        self._client = joined.client
        self._facts = facts
        self._relay: Relay | None = None
        self.channel = channel
        self.key = joined.key
        self.job_spec = joined.job_spec
        self.address = address
        self.update()

    def update(self) -> None:
        """Send the zygote the membership and the coordinator's address, so that it can report the agent's death."""
        self._host.zygote.send_membership(describe_membership(self._client))

    def open_store(self) -> tuple[str, str, str]:
        """Return the coordinator's address, the job's key, and the relay's path; open the relay at the first call.

        The path is empty if the coordinator is on this host: its ranks need no relay.

        Raises:
            OSError: a socket cannot be created.
        """
        if self._relay is None and not self._client.address.path:
            self._relay = Relay(self._client.endpoint, self.key, lambda: self._client.member)
        return str(self._client.address), str(self.key or ""), "" if self._relay is None else self._relay.path

    def rejoin(self) -> None:
        """Join again as a new member, after this host's membership has ended.

        Raises:
            PhalanxError: the coordinator does not answer.
        """
        facts = {**self._facts, "reached": self._client.address.host}
        self.channel.join_again(facts, _REJOIN_S, (self.channel.first,))

    def follow(self, epoch: bytes) -> None:
        """Redirect the relay and the zygote to the new coordinator, which has the ranks' sessions and results."""
        if self._relay is not None:
            self._relay.redirect(self._client.endpoint, epoch)
        self.update()

    def close(self) -> None:
        """Close the relay."""
        if self._relay is not None:
            self._relay.close()
