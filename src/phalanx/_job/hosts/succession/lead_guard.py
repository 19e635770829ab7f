"""`LeadGuard` prevents two leaders: a majority must agree before the leader continues without a host.

No vote is needed if no host could take over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from phalanx._comm.control.key import Key
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.coordinator.standby_replicas import StandbyReplicas
from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage
from phalanx._job.hosts.succession.leader_state import KEY, LeaderState
from phalanx._job.hosts.succession.proposer import FEWEST_VOTERS, Proposer
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.hosts.succession.witness.witness import Witness
from phalanx.errors import LaunchError, PhalanxError

_LEAST_S = 3.0  # the minimum time for a vote, however short the hosts' timeout is


class LeadGuard:
    """`LeadGuard` has the leader's proposer, and the lost hosts that the voters have not agreed to remove yet.

    Arguments:
        replicas: the standby copies of this host's coordinator; None if no other host can take over.
        witness: the job's witness, if it has one.
        proposer: on an elected host, the proposer that continues its term.
    """

    def __init__(
        self,
        channel: ControlChannel,
        replicas: StandbyReplicas | None,
        host_timeout_s: float = 0.0,
        witness: Witness | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._channel = channel
        self._replicas = replicas
        self._limit_s = max(_LEAST_S, 2 * host_timeout_s)
        self._witness = witness
        self._proposer = proposer
        self._lost: dict[int, tuple[str, float]] = {}  # member -> why it is lost, and since when

    @classmethod
    def of_first_host(
        cls, rendezvous: Rendezvous, channel: ControlChannel, replicas: StandbyReplicas, key: Key
    ) -> LeadGuard:
        """Return the guard of a job that begins at this host; it does nothing if all agents are on this host."""
        if rendezvous.is_local:
            return cls(channel, None)
        witness = Witness(rendezvous.witness, key, os.urandom(8).hex()) if rendezvous.witness else None
        return cls(channel, replicas, rendezvous.host_timeout_s, witness)

    @property
    def is_begun(self) -> bool:
        """Return whether another host may take over."""
        return self._proposer is not None

    def begin(self, num_hosts: int) -> None:
        """Start the votes of an elastic job, if there are enough voters."""
        num_voters = num_hosts + (self._witness is not None)
        if self._proposer is None and self._replicas is not None and num_voters >= FEWEST_VOTERS:
            calls = None if self._witness is None else WitnessCalls(self._witness, is_new=True)
            self._proposer = Proposer(self._channel, self._replicas, calls)

    def record(self, state: LeaderState) -> None:
        """Store the leader's decisions for a host that takes over, before later messages are sent."""
        self._channel.put_key(KEY, state.to_bytes())

    def clear_record(self) -> None:
        """Remove the decisions of the previous attempt, which a later leader must not use."""
        self._channel.put_key(KEY, b"")

    def set_voters(self, voters: Sequence[int]) -> None:
        """Make a generation's hosts voters, after they were notified of it; `voters` is in the order of succession."""
        self.begin(len(voters))
        if self._proposer is not None:
            members = [member for member in voters if member not in self._lost]
            own = self._channel.member  # a leaving host has no ranks, but a vote as long as it leads
            self._proposer.set_voters(members if own in members else [own, *members])

    def update_voters(self, voters: Sequence[int], is_alone: bool) -> None:
        """Make these hosts the voters, after ranks have finished or a host was removed.

        If this host `is_alone` with ranks that have not finished, no other host may take over.
        """
        if self._proposer is not None and is_alone:
            self._proposer.release()
        elif self._proposer is not None:
            self.set_voters(voters)

    @property
    def has_standbys(self) -> bool:
        """Return whether another host takes over if this host is lost."""
        return self._proposer is not None and self._proposer.has_standbys

    def can_continue_with(self, num_others: int) -> bool:
        """Return whether `num_others` other hosts could elect a leader of their own."""
        return 1 + num_others + (self._witness is not None) >= FEWEST_VOTERS and num_others > 0

    def hand_over(self) -> None:
        """Keep delaying answers whose changes the standbys lack, even after `close`: another host will lead."""
        if self._proposer is not None:
            self._proposer.hand_over()

    def defer(self, member: int, why: str, voters: Sequence[int]) -> bool:
        """Ask the voters whether to continue without a host; return False if no vote is needed."""
        if self._proposer is None or self._proposer.has_left(member):
            return False
        if member not in self._lost:
            self._lost[member] = why, time.monotonic()
            self.set_voters(voters)
        return True

    def pop_agreed(self) -> list[tuple[int, str]]:
        """Return the hosts whose removal was agreed on since the last call, each with the reason for its loss.

        Raises:
            LaunchError: a majority has not agreed in time, or has agreed on another leader.
        """
        proposer = self._proposer
        if proposer is None:
            return []
        agreed = [(member, why) for member, (why, _) in self._lost.items() if proposer.has_left(member)]
        for member, _ in agreed:
            del self._lost[member]
        if proposer.is_deposed or any(time.monotonic() > limit for limit in self._limits):
            why = "have agreed on another leader" if proposer.is_deposed else "may have agreed on another leader"
            raise LaunchError(
                f"phalanx run: this host leads the job, and stops: it reaches {proposer.describe_lack()}, and "
                f"the others {why}. It stops its ranks, so that the job does not split in two. Read the output of the "
                "other hosts; if none of them continues, start again from the last checkpoint."
            )
        return agreed

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll before `receive`."""
        return () if self._proposer is None else self._proposer.fds

    @property
    def due(self) -> float | None:
        """Return when to call `receive` even if no descriptor is ready; None for never."""
        times = [*self._limits, None if self._proposer is None else self._proposer.due]
        return min((at for at in times if at is not None), default=None)

    @property
    def _limits(self) -> list[float]:
        """Return the time by which a majority must agree, for each pending vote."""
        candidate_since = None if self._proposer is None else self._proposer.candidate_since
        return [
            *(at + self._limit_s for _, at in self._lost.values()),
            *(() if candidate_since is None else (candidate_since + self._limit_s,)),
        ]

    def pop_standbys(self) -> tuple[int, ...] | None:
        """Return the standbys in the order in which they would lead, if that has changed since the last call."""
        return None if self._proposer is None else self._proposer.pop_standbys()

    @property
    def polling_places(self) -> tuple[str, ...]:
        """Return the addresses at which hosts find the new leader if this host is lost; none without standbys."""
        return () if self._proposer is None else self._proposer.polling_places

    def receive(self) -> list[str]:
        """Repeat unanswered messages, and remove standbys that delay answers; return lines for the user."""
        return [] if self._proposer is None else self._proposer.receive()

    def process(self, message: ControlMessage) -> None:
        """Process a host's message about the succession.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        if self._proposer is None:
            return
        if message.kind == "standby ready":
            self._proposer.on_standby(message.member, str(message.body["ticket"]), str(message.body["address"]))
        else:
            self._proposer.process(message.member, message.body)

    def close(self) -> None:
        """Stop the votes, and stop delaying answers."""
        if self._proposer is not None:
            self._proposer.close()

    def forget(self) -> None:
        """Delete the job's vote at the witness, after `close`: the job has ended on all hosts."""
        if self._proposer is not None and self._witness is not None:
            with contextlib.suppress(PhalanxError, OSError):  # the witness then keeps a few hundred bytes
                self._witness.forget()
            self._witness.close()
