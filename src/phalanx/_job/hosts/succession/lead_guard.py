"""`LeadGuard` prevents two leaders: a majority agrees before the leader continues without a host.

Without standbys no host could take over, and no vote is needed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from phalanx._comm.control.key import Key
from phalanx._job.coordinator.followers import Followers
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage
from phalanx._job.hosts.succession.leader_state import KEY, LeaderState
from phalanx._job.hosts.succession.proposer import FEWEST_VOTERS, Proposer
from phalanx._job.hosts.succession.witness.calls import WitnessCalls
from phalanx._job.hosts.succession.witness.witness import Witness
from phalanx.errors import LaunchError, PhalanxError

_FEWEST_S = 3.0  # the least time to agree, however short the hosts' timeout is


class LeadGuard:
    """`LeadGuard` holds the leader's succession, once there is one, and lost hosts that are not agreed on.

    Arguments:
        followers: this host's coordinator's; None: the job ends with its first host.
        witness: the job's witness, if it has one.
        proposer: that of an elected host.
    """

    def __init__(
        self,
        channel: ControlChannel,
        followers: Followers | None,
        host_timeout_s: float = 0.0,
        witness: Witness | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._channel = channel
        self._followers = followers
        self._limit_s = max(_FEWEST_S, 2 * host_timeout_s)
        self._witness = witness
        self._proposer = proposer
        self._lost: dict[int, tuple[str, float]] = {}  # why, and since when

    @classmethod
    def of_first_host(
        cls, rendezvous: Rendezvous, channel: ControlChannel, followers: Followers, key: Key
    ) -> LeadGuard:
        """Return the guard of a job that begins at this host; it does nothing if all agents are on this host."""
        if rendezvous.is_local:
            return cls(channel, None)
        witness = Witness(rendezvous.witness, key, os.urandom(8).hex()) if rendezvous.witness else None
        return cls(channel, followers, rendezvous.host_timeout_s, witness)

    @property
    def is_begun(self) -> bool:
        """Return whether another host may take over."""
        return self._proposer is not None

    def begin(self, num_hosts: int) -> None:
        """Begin with the succession of an elastic job, once its hosts are enough for that."""
        num_voters = num_hosts + (self._witness is not None)
        if self._proposer is None and self._followers is not None and num_voters >= FEWEST_VOTERS:
            calls = None if self._witness is None else WitnessCalls(self._witness, is_new=True)
            self._proposer = Proposer(self._channel, self._followers, calls)

    def record(self, state: LeaderState) -> None:
        """Store the leader's decisions for a host that takes over, before messages that are put later are sent."""
        self._channel.put_key(KEY, state.to_bytes())

    def clear_record(self) -> None:
        """Remove the decisions of the previous attempt, which a later leader must not use."""
        self._channel.put_key(KEY, b"")

    def set_voters(self, voters: Sequence[int]) -> None:
        """Let the hosts of a generation vote, after they were notified of it. They would lead in this order."""
        self.begin(len(voters))
        if self._proposer is not None:
            members = [member for member in voters if member not in self._lost]
            own = self._channel.member  # a leaving host has no ranks, but a vote as long as it leads
            self._proposer.set_voters(members if own in members else [own, *members])

    def update_voters(self, voters: Sequence[int], is_alone: bool) -> None:
        """Have these hosts vote from now on, if another one may take over: ranks have finished, or a host is lost.

        If this host `is_alone` with ranks that have not finished, none may: those that are left could be no majority.
        """
        if self._proposer is not None and is_alone:
            self._proposer.release()
        elif self._proposer is not None:
            self.set_voters(voters)

    @property
    def has_standbys(self) -> bool:
        """Return whether another host takes over when this one is lost."""
        return self._proposer is not None and self._proposer.has_standbys

    def can_continue_with(self, num_others: int) -> bool:
        """Return whether one of `num_others` other hosts could lead them."""
        return 1 + num_others + (self._witness is not None) >= FEWEST_VOTERS and num_others > 0

    def hand_over(self) -> None:
        """Grant nothing any more that the standbys don't have, to the end: another host is to lead."""
        if self._proposer is not None:
            self._proposer.hand_over()

    def defer(self, member: int, why: str, voters: Sequence[int]) -> bool:
        """Ask the voters whether to continue without a host; False if there are none."""
        if self._proposer is None or self._proposer.has_left(member):
            return False
        if member not in self._lost:
            self._lost[member] = why, time.monotonic()
            self.set_voters(voters)
        return True

    def pop_agreed(self) -> list[tuple[int, str]]:
        """Return the hosts whose removal was agreed on since the last call.

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
                f"phalanx run: this host leads the job, and does not go on: it hears {proposer.describe_lack()}, and "
                f"the others {why}. Its ranks are stopped, so that no two halves train. Read the output of the other "
                "hosts; if none of them goes on, start again from the last checkpoint."
            )
        return agreed

    @property
    def fds(self) -> tuple[int, ...]:
        """Return descriptors that are readable when `receive` has something to do."""
        return () if self._proposer is None else self._proposer.fds

    @property
    def due(self) -> float | None:
        """Return when to look again although nothing has come."""
        times = [*self._limits, None if self._proposer is None else self._proposer.due]
        return min((at for at in times if at is not None), default=None)

    @property
    def _limits(self) -> list[float]:
        """Return until when a majority has to agree, to each thing that it is asked about."""
        candidate_since = None if self._proposer is None else self._proposer.candidate_since
        return [
            *(at + self._limit_s for _, at in self._lost.values()),
            *(() if candidate_since is None else (candidate_since + self._limit_s,)),
        ]

    def pop_standbys(self) -> tuple[int, ...] | None:
        """Return who takes over if this host is lost, if that has changed since the last call."""
        return None if self._proposer is None else self._proposer.pop_standbys()

    @property
    def polling_places(self) -> tuple[str, ...]:
        """Return the addresses at which hosts learn the leader if this one is lost; none without standbys."""
        return () if self._proposer is None else self._proposer.polling_places

    def receive(self) -> list[str]:
        """Repeat unanswered messages, and remove standbys that delay the others; return lines for the user."""
        return [] if self._proposer is None else self._proposer.receive()

    def process(self, message: ControlMessage) -> None:
        """Process a host's message on the succession.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        if self._proposer is None:
            return
        if message.kind == "stands by":
            self._proposer.on_standby(message.member, str(message.body["ticket"]), str(message.body["address"]))
        else:
            self._proposer.process(message.member, message.body)

    def close(self) -> None:
        """Hold nothing back any more."""
        if self._proposer is not None:
            self._proposer.close()

    def forget(self) -> None:
        """Have the witness forget the job, which is over on all hosts; after `close`."""
        if self._proposer is not None and self._witness is not None:
            with contextlib.suppress(PhalanxError, OSError):  # it keeps some hundred bytes
                self._witness.forget()
            self._witness.close()
